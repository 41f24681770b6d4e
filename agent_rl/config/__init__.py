"""The configuration: its schema here, reading, rules and key pages in the modules beside."""

from agent_rl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    EngineConfig,
    EvalConfig,
    ImagesConfig,
    OptimConfig,
    PolicyConfig,
    RolloutConfig,
    RoutingConfig,
    RunConfig,
    SamplingConfig,
    SandboxConfig,
    TasksConfig,
    TrainConfig,
    TrainerConfig,
)

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "EngineConfig",
    "EvalConfig",
    "ImagesConfig",
    "OptimConfig",
    "PolicyConfig",
    "RolloutConfig",
    "RoutingConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "TasksConfig",
    "TrainConfig",
    "TrainerConfig",
]
