"""Log-probs and entropies of many rows: values, gradients, and how much is held at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agent_rl.trainer.logprobs import entropy, token_logprobs

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("process_group")]

VOCAB = 11


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes; a view makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("count", [0, 1, 1024, 2500])
def test_values_and_gradients_of_any_number_of_rows(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    scaled = torch.randn(count, VOCAB, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCAB, (count,), generator=generator)
    p = scaled.detach().double().softmax(-1)
    picked, spread = token_logprobs(scaled, labels), entropy(scaled)
    assert picked.shape == spread.shape == (count,)
    expected = p.log().gather(1, labels[:, None])[:, 0]
    assert torch.allclose(picked.double(), expected, atol=1e-6)
    assert torch.allclose(spread.double(), -(p * p.log()).sum(-1), atol=1e-6)
    (picked.sum() + 2 * spread.sum()).backward()
    one_hot = torch.nn.functional.one_hot(labels, VOCAB)
    slope = -p * (p.log() - (p * p.log()).sum(-1, keepdim=True))
    assert scaled.grad is not None
    assert torch.allclose(scaled.grad.double(), one_hot - p + 2 * slope, atol=1e-5)


def test_without_a_gradient_no_copy_of_all_rows_is_made() -> None:
    scaled, labels = torch.randn(5000, VOCAB), torch.zeros(5000, dtype=torch.long)
    with torch.no_grad(), Largest() as largest:
        token_logprobs(scaled, labels)
        entropy(scaled)
    assert VOCAB * 1024 <= largest.numel < VOCAB * 2048
