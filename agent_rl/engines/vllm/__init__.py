"""vLLM as a rollout engine: its HTTP dialect, its unsafe settings, how a server is launched."""

from agent_rl.engines.vllm.launch import VLLMLaunch
from agent_rl.engines.vllm.server import VLLMServer

__all__ = ["VLLMLaunch", "VLLMServer"]
