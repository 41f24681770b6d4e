"""Cross-field rules of a configuration: what must hold between keys before anything starts.

A rule is a function from the configuration to the faults it finds, listed at the end of its file.
"""

from __future__ import annotations

from agent_rl.config.rules.fault import Fault, Rule
from agent_rl.config.rules.loss import OBJECTIVE_RULES
from agent_rl.config.rules.machine import MACHINE_RULES
from agent_rl.config.rules.parallel import PARALLEL_RULES
from agent_rl.config.rules.ranges import RANGES_RULES
from agent_rl.config.rules.rollout import ROLLOUT_RULES
from agent_rl.config.rules.tasks import TASK_RULES
from agent_rl.config.schema import RunConfig

RULES: tuple[Rule, ...] = (
    *RANGES_RULES,
    *OBJECTIVE_RULES,
    *ROLLOUT_RULES,
    *PARALLEL_RULES,
    *TASK_RULES,
)


def check_rules(config: RunConfig) -> list[Fault]:
    """Every broken rule; empty when the configuration can be used on this machine."""
    return [fault for rule in (*RULES, *MACHINE_RULES) for fault in rule(config)]


def check_rules_anywhere(config: RunConfig) -> list[Fault]:
    """Every broken rule that would be broken on any machine."""
    return [fault for rule in RULES for fault in rule(config)]
