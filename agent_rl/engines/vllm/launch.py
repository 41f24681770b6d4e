"""Starting a vLLM server, on a GPU or on a plain CPU."""

from __future__ import annotations

from pathlib import Path

from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.server_process import ServerSpec, engine_python
from agent_rl.errors import EngineError

CPU_SHIM = Path(__file__).parent / "cpu_shim"
_BLOCK_TOKENS = 32  # only whole blocks of a prefix are found again
_CPU_KV_BYTES = 64 << 20


def vllm_spec(deployment: Deployment, model: Path, port: int) -> ServerSpec:
    """Describe a server of the folder ``model``.

    Raises ``EngineError`` where weights would have to travel otherwise than by disk.
    """
    config = deployment.config
    if config.weight_transfer != "disk":
        raise EngineError("vLLM takes weights from disk only: set weight_transfer=disk")
    command = [
        *(str(engine_python("vllm")), "-m", "vllm.entrypoints.cli.main", "serve"),
        *(str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", config.dtype, "--max-model-len", str(deployment.context_length)),
        *("--max-num-seqs", str(config.max_sessions), "--block-size", str(_BLOCK_TOKENS)),
        *("--tensor-parallel-size", str(config.tensor_parallel), "--seed", "0"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--tokens-only"),
    ]
    if config.capture_routing:
        command.append("--enable-return-routed-experts")
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, flush and weight updates
        "OMP_NUM_THREADS": str(config.num_threads),
    }
    if config.device == "cpu":
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(_CPU_KV_BYTES)]
        command += ["--max-num-batched-tokens", str(max(1024, deployment.context_length))]
        environment |= {
            "PYTHONPATH": str(CPU_SHIM),
            "CUDA_VISIBLE_DEVICES": "",
            # Some operators compile themselves even so: minutes of C++ for a tiny model, and
            # an error where the environment's path has a space in it.
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return deployment.server_spec(port, command, environment)
