"""SGLang as a rollout engine: its HTTP dialect, its unsafe settings, the start of a server."""

from agent_rl.engines.sglang.launch import sglang_spec
from agent_rl.engines.sglang.server import SGLangServer

__all__ = ["SGLangServer", "sglang_spec"]
