"""How a vLLM server is started, on a GPU or on a plain CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent_rl.engines.http.server_process import ServerSpec, engine_python

CPU_SHIM = Path(__file__).parent / "cpu_shim"


@dataclass(frozen=True)
class VLLMLaunch:
    """Settings of one server. ``extra_args`` go to the command line as they are."""

    model_path: Path
    port: int
    dtype: str = "float32"
    context_length: int = 1024
    kv_cache_bytes: int = 64 << 20
    max_running: int = 64
    block_size: int = 32  # tokens; only whole blocks are found again
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
            *(str(engine_python("vllm")), "-m", "vllm.entrypoints.cli.main", "serve"),
            *(str(self.model_path), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", self.dtype, "--max-model-len", str(self.context_length)),
            *("--max-num-seqs", str(self.max_running), "--block-size", str(self.block_size)),
            *("--tensor-parallel-size", str(self.tensor_parallel), "--seed", str(self.seed)),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--tokens-only"),
        ]
        if self.capture_routing:
            args.append("--enable-return-routed-experts")
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # pause, flush and weight updates
            "OMP_NUM_THREADS": str(self.num_threads),
        }
        if self.device == "cpu":
            args += ["--enforce-eager", "--kv-cache-memory-bytes", str(self.kv_cache_bytes)]
            args += ["--max-num-batched-tokens", str(max(1024, self.context_length))]
            environment |= {
                "PYTHONPATH": str(CPU_SHIM),
                "CUDA_VISIBLE_DEVICES": "",
                # Some operators compile themselves even so: minutes of C++ for a tiny model, and
                # an error where the environment's path has a space in it.
                "TORCHDYNAMO_DISABLE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        return ServerSpec(
            name=f"vllm-{self.port}",
            command=(*args, *self.extra_args),
            environment=environment,
            url=f"http://127.0.0.1:{self.port}",
            health_path="/health",
            log_file=log_file,
            niceness=self.niceness,
        )
