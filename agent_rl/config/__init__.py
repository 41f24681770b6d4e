"""The configuration: the sections of its schema; reading, rules and key pages lie beside."""

from agent_rl.config.schema import (  # noqa: F401 (names for users)
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
