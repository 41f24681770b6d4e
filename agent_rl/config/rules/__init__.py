"""Rules between the keys of a configuration: what must hold before anything starts.

A rule is a function from the configuration to the faults it finds, listed at the end of its file.
"""

from __future__ import annotations

from agent_rl.config.rules.fault import Fault, Rule
from agent_rl.config.rules.inference import INFERENCE_RULES
from agent_rl.config.rules.loss import OBJECTIVE_RULES
from agent_rl.config.rules.machine import MACHINE_RULES
from agent_rl.config.rules.processes import PROCESS_RULES
from agent_rl.config.rules.tasks import TASK_RULES
from agent_rl.config.schema import RunConfig

RULES: tuple[Rule, ...] = (
    *OBJECTIVE_RULES,
    *INFERENCE_RULES,
    *PROCESS_RULES,
    *TASK_RULES,
)


def check_rules(config: RunConfig) -> list[Fault]:
    """Return every broken rule; none when the configuration can be used on this machine."""
    return [fault for rule in (*RULES, *MACHINE_RULES) for fault in rule(config)]


def check_rules_anywhere(config: RunConfig) -> list[Fault]:
    """Return every broken rule that would be broken on any machine."""
    return [fault for rule in RULES for fault in rule(config)]
