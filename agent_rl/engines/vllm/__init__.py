"""vLLM as a rollout engine: its HTTP dialect, its unsafe settings, the start of a server."""

from agent_rl.engines.vllm.launch import vllm_spec
from agent_rl.engines.vllm.server import VLLMServer

__all__ = ["VLLMServer", "vllm_spec"]
