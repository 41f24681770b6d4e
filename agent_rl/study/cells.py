"""The cells of the stability study: which runs it is made of.

The engine is of low precision and the trainer computes in float32. By default the engine rounds all
weights to int4, and a third of all (token, layer) sets of the starting policy differ between the
two; replay takes those away and leaves the error of the values. With ``router_int4_simulated``
about as many sets differ, and apart from bfloat16 nothing else does. The rest is the embedded
training run, of another length. A cell is a method, a number of optimizer steps taken from one
rollout (``num_mini_steps``: 1 is on-policy for the trainer, 4 is not) and a seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from agent_rl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    EngineConfig,
    EvalConfig,
    OptimConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
)

EngineDtype = Literal["bfloat16", "fp8_simulated", "int4_simulated", "router_int4_simulated"]
ENGINES: Mapping[str, EngineDtype] = {name: name for name in get_args(EngineDtype)}


@dataclass(frozen=True)
class Method:
    """One method of the comparison."""

    title: str
    loss: Literal["grpo", "gspo"]
    replay: Literal["off", "r3"] = "off"
    correction: Literal["none", "tis"] = "none"


METHODS: Mapping[str, Method] = {
    "grpo": Method("GRPO", "grpo"),
    "grpo_tis": Method("GRPO + TIS", "grpo", correction="tis"),
    "gspo": Method("GSPO", "gspo"),
    "grpo_r3": Method("GRPO + R3", "grpo", replay="r3"),
    "gspo_r3": Method("GSPO + R3", "gspo", replay="r3"),
}


@dataclass(frozen=True)
class Setting:
    """The setting that all cells share; a folder holds cells of one setting."""

    engine_dtype: EngineDtype = "int4_simulated"
    steps: int = 25
    groups_per_step: int = 12
    group_size: int = 8
    lr: float = 7e-4
    num_eval: int = 128


@dataclass(frozen=True)
class Matrix:
    """The cells that there are. It may grow: finished cells of the folder stay finished."""

    methods: tuple[str, ...] = tuple(METHODS)
    mini_steps: tuple[int, ...] = (1, 4)
    seeds: tuple[int, ...] = (0, 1, 2)

    def cells(self) -> list[Cell]:
        """One seed after the other: a study that is stopped early compares whole seeds."""
        return [
            Cell(method, mini, seed)
            for seed, mini, method in product(self.seeds, self.mini_steps, self.methods)
        ]


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    num_mini_steps: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-m{self.num_mini_steps}-s{self.seed}"

    def config(self, setting: Setting, run_root: Path) -> RunConfig:
        method = METHODS[self.method]
        return RunConfig(
            name=self.name,
            seed=self.seed,
            run_root=str(run_root),
            agent=AgentConfig(max_turns=8, max_tokens=256),
            engine=EngineConfig(dtype=setting.engine_dtype),
            routing=RoutingConfig(replay=method.replay),
            algorithm=AlgorithmConfig(
                loss=method.loss,
                correction=method.correction,
                group_size=setting.group_size,
                groups_per_step=setting.groups_per_step,
                num_mini_steps=self.num_mini_steps,
            ),
            optim=OptimConfig(lr=setting.lr),
            train=TrainConfig(
                steps=setting.steps, save_every=setting.steps, keep_last=1, mismatch_every=5
            ),
            eval=EvalConfig(num_tasks=setting.num_eval),
        )
