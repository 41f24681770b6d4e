"""Starting an SGLang server, on a GPU or on a plain CPU."""

from __future__ import annotations

from pathlib import Path

from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.server_process import ServerSpec, engine_python

CPU_SHIM = Path(__file__).parent / "cpu_shim"
_CHUNKED_PREFILL_TOKENS = 512
_CPU_POOL_TOKENS = 65536  # KV slots, where there is no GPU memory to derive them from


def sglang_spec(deployment: Deployment, model: Path, port: int) -> ServerSpec:
    """Describe a server of the folder ``model``.

    Seeds are honoured only with ``--enable-deterministic-inference`` among ``engine.extra_args``,
    which costs throughput.
    """
    config = deployment.config
    command = [
        *(str(engine_python("sglang")), "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--port", str(port)),
        *("--host", "127.0.0.1", "--dtype", config.dtype),
        *("--context-length", str(deployment.context_length)),
        *("--max-running-requests", str(config.max_sessions)),
        *("--chunked-prefill-size", str(_CHUNKED_PREFILL_TOKENS)),
        *("--tp-size", str(config.tensor_parallel), "--random-seed", "0"),
        *("--weight-version", "start", "--log-level", "warning"),
        # Ids in, ids out: no tokenizer to wait for, and no end-of-sequence id of its own.
        *("--skip-tokenizer-init", "--grammar-backend", "none", "--skip-server-warmup"),
    ]
    if config.capture_routing:
        command.append("--enable-return-routed-experts")
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(config.num_threads)}
    if config.device == "cpu":
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--sleep-on-idle"]
        command += ["--max-total-tokens", str(_CPU_POOL_TOKENS)]
        environment |= {
            "PYTHONPATH": str(CPU_SHIM),
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
    return deployment.server_spec(port, command, environment)
