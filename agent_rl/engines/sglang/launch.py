"""How an SGLang server is started, on a GPU or on a plain CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent_rl.engines.http.server_process import ServerSpec, engine_python

CPU_SHIM = Path(__file__).parent / "cpu_shim"


@dataclass(frozen=True)
class SGLangLaunch:
    """Settings of one server. ``extra_args`` go to the command line as they are.

    ``deterministic`` is needed for seeds to be honoured, and costs throughput.
    """

    model_path: Path
    port: int
    dtype: str = "float32"
    context_length: int = 1024
    max_total_tokens: int = 65536
    max_running: int = 64
    chunked_prefill_size: int = 512
    tensor_parallel: int = 1
    capture_routing: bool = True
    device: str = "cpu"
    num_threads: int = 1
    niceness: int = 0
    seed: int = 0
    extra_args: tuple[str, ...] = ()

    def spec(self, log_file: Path) -> ServerSpec:
        """The command, ready to be supervised."""
        args = [
            *(str(engine_python("sglang")), "-m", "sglang.launch_server"),
            *("--model-path", str(self.model_path), "--port", str(self.port)),
            *("--host", "127.0.0.1", "--dtype", self.dtype),
            *("--context-length", str(self.context_length)),
            *("--max-running-requests", str(self.max_running)),
            *("--chunked-prefill-size", str(self.chunked_prefill_size)),
            *("--tp-size", str(self.tensor_parallel), "--random-seed", str(self.seed)),
            *("--weight-version", "start", "--log-level", "warning"),
            # Ids in, ids out: no tokenizer to wait for, and no end-of-sequence id of its own.
            *("--skip-tokenizer-init", "--grammar-backend", "none", "--skip-server-warmup"),
        ]
        if self.capture_routing:
            args.append("--enable-return-routed-experts")
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.num_threads)}
        if self.device == "cpu":
            args += ["--device", "cpu", "--attention-backend", "torch_native"]
            args += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--sleep-on-idle"]
            args += ["--max-total-tokens", str(self.max_total_tokens)]
            environment |= {
                "PYTHONPATH": str(CPU_SHIM),
                "SGLANG_USE_CPU_ENGINE": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
        return ServerSpec(
            name=f"sglang-{self.port}",
            command=(*args, *self.extra_args),
            environment=environment,
            url=f"http://127.0.0.1:{self.port}",
            health_path="/health",
            log_file=log_file,
            niceness=self.niceness,
        )
