"""An engine configuration on this machine: what its servers are launched, reached and used by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent_rl.config.schema import EngineConfig
from agent_rl.engines.http.server_process import ServerSpec
from agent_rl.engines.http.transport import TransportOptions

_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.2}  # of a log-prob, from rounding alone


@dataclass(frozen=True)
class Deployment:
    """Servers of one policy.

    Args:
        config: of which kind they are, and how they are launched here or attached to.
        policy: Hugging Face folder of the starting weights; folders of later ones take their
            configuration and tokenizer from it.
        work_dir: logs, serving folders and weight exchange go below it.
        context_length: tokens of the longest request, prompt and completion together.
        refuse_bad_rows: refuse a reply with damaged or absent rows; otherwise hand on what came.
        drain_timeout_s: for running requests to end before an update aborts them.
    """

    config: EngineConfig
    policy: Path
    work_dir: Path
    context_length: int = 1024
    refuse_bad_rows: bool = True
    drain_timeout_s: float = 120.0
    niceness: int = 0
    transport: TransportOptions = field(default_factory=TransportOptions)

    @property
    def serving_folder(self) -> Path:
        """Folder of the starting weights in the form that servers read."""
        return self.work_dir / "serving"

    @property
    def exchange(self) -> Path:
        """Folder of later weights, which a server must see under the same path."""
        return self.work_dir / "weights"

    @property
    def verify_tolerance(self) -> float:
        """Difference of log-probs from the trainer's that rounding explains, absolute."""
        return _TOLERANCES[self.config.dtype]

    def server_spec(
        self, port: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> ServerSpec:
        """Describe the server that ``command`` starts on ``port``, ready to be supervised."""
        name = f"{self.config.kind}-{port}"
        return ServerSpec(
            name=name,
            command=(*command, *self.config.extra_args),
            environment=environment,
            url=f"http://127.0.0.1:{port}",
            health_path="/health",
            log_file=self.work_dir / "logs" / f"{name}.log",
            niceness=self.niceness,
            start_timeout_s=self.config.start_timeout_s,
        )
