"""Several engines as one: requests balanced over them, sessions moved when one fails."""

from agent_rl.engines.balanced.balanced_engine import BalancedEngine, BalancedOptions, BalancedStats

__all__ = ["BalancedEngine", "BalancedOptions", "BalancedStats"]
