"""What ``test_cpu_backend`` runs in a fresh process; prints one word for each check that holds."""

import sys

import torch

from agent_rl.trainer import cpu_backend, megatron

# isort: split
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.transformer.moe import moe_utils, token_dispatcher


def patched_state() -> list[object]:
    """Everything that ``install`` may replace."""
    modules = [module for name, module in sorted(sys.modules.items()) if "megatron.core" in name]
    return [
        *(module.__dict__.get("torch") is torch for module in modules),
        moe_utils.maybe_move_tensor_to_cpu,
        token_dispatcher.sort_chunks_by_idxs,
        Float16OptimizerWithFloat16Params.__init__,
        hasattr(moe_utils, "te_general_gemm"),
    ]


def check_import_starts_nothing() -> None:
    assert megatron.MegatronTrainer
    assert not torch.distributed.is_initialized()
    print("silent")


def check_reversible() -> None:
    before = patched_state()
    real = (torch.Tensor.type, torch.Tensor.cuda, torch.zeros, torch.cuda)
    with cpu_backend.installed():
        inside = patched_state()
        assert inside != before
        cpu_backend.install()
        assert patched_state() == inside
        with cpu_backend.installed():
            pass
        assert patched_state() == inside
        assert (torch.Tensor.type, torch.Tensor.cuda, torch.zeros, torch.cuda) == real
        seen_by_megatron = token_dispatcher.torch
        assert seen_by_megatron.zeros(2, device="cuda").device.type == "cpu"
        assert not seen_by_megatron.cuda.is_available()
    assert patched_state() == before
    try:
        with cpu_backend.installed():
            raise RuntimeError
    except RuntimeError:
        assert patched_state() == before
    print("reversible")


def check_identity_sort() -> None:
    """An order that is the identity copies nothing; any other one sorts as upstream does."""
    tokens, sizes = torch.arange(12.0).view(6, 2), torch.tensor([2, 1, 3])
    upstream = moe_utils.sort_chunks_by_idxs
    with cpu_backend.installed():
        ours = token_dispatcher.sort_chunks_by_idxs
        assert ours(tokens, sizes, torch.arange(3))[0] is tokens
        for order in (torch.tensor([2, 0, 1]), torch.tensor([1, 0, 2])):
            assert torch.equal(ours(tokens, sizes, order)[0], upstream(tokens, sizes, order)[0])
    print("sorts")


check_import_starts_nothing()
check_reversible()
check_identity_sort()
