"""SGLang as a rollout engine: its HTTP dialect, its unsafe flags, how a server is launched."""

from agent_rl.engines.sglang.launch import SGLangLaunch
from agent_rl.engines.sglang.server import SGLangServer

__all__ = ["SGLangLaunch", "SGLangServer"]
