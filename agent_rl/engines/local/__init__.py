"""The embedded engine: transformers on CPU with continuous batching and router capture."""

from agent_rl.engines.local.local_engine import LocalEngine

__all__ = ["LocalEngine"]
