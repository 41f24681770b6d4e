"""Notes of Megatron that say nothing to whoever trains: about packages and about itself.

All versions. This module imports Megatron, with the notes of its import silenced.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def _log_errors_only(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within: no warnings from Megatron's modules about its own internal calls."""
    # 0.19.2 calls GPTModel deprecated; its successor does not take layers of our own yet.
    with _log_errors_only("megatron.core.models.gpt.gpt_model"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # Where torch reports that Megatron calls a collective by its old name.
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.c10d_logger")
        yield


# Where a CUDA compiler is installed and no device, torch says so at this import.
with _log_errors_only("torch.utils.cpp_extension"), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer.distrib_optimizer
    import megatron.core.optimizer_param_scheduler
    import megatron.core.pipeline_parallel.schedules  # noqa: F401
