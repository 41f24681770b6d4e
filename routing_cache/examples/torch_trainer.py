# pyright: basic
"""A custom trainer: recorded experts replayed in a PyTorch MoE through a forward hook.

The router's live logits weigh the recorded experts (arXiv 2510.11370, equation of the replayed
gate), so the router keeps learning. Rows stay uint8 until they are on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from routing_cache import PackedRows, PackedSample, RoutingCache, RowLayout, pack, spread_rows

LAYOUT = RowLayout(num_hidden_layers=2, moe_layers=(0, 1), num_experts=8, moe_top_k=2)
WIDTH = 16


class Router(nn.Linear):
    """Logits over the experts; :class:`Replay` hooks into its output."""


class MoeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(WIDTH, LAYOUT.num_experts, bias=False)
        self.experts = nn.Parameter(torch.randn(LAYOUT.num_experts, WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [T, WIDTH]
        logits = self.router(x)
        chosen = logits.topk(LAYOUT.moe_top_k, dim=-1).indices
        weights = torch.softmax(logits.gather(1, chosen), dim=-1)
        outputs = torch.einsum("td,edf->tef", x, self.experts)
        picked = outputs.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return x + (weights[..., None] * picked).sum(dim=1)


class Replay:
    """Makes every router choose the recorded experts, layer by layer.

    The hook subtracts a constant from the logits of the experts that were not recorded, so the
    top-k finds the recorded ones and their weights are those of the live logits.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows: torch.Tensor | None = None
        routers = [m for m in model.modules() if isinstance(m, Router)]
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._hook(layer))

    def load(self, sample: PackedSample, token_ids: np.ndarray, device: torch.device) -> None:
        """Check the sample's digest, then put its rows on the device, still one byte per id."""
        sample.verify(token_ids)
        rows, present = sample.gather()
        if not present[:-1].all():
            raise ValueError(f"sample {sample.index} has missing rows")
        rows[~present] = spread_rows(int((~present).sum()), LAYOUT)  # the last token
        self._rows = torch.from_numpy(rows).to(device)  # [T, L, K]

    def clear(self) -> None:
        self._rows = None

    def _hook(self, layer: int):
        def replay(_: nn.Module, __: tuple[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
            if self._rows is None:
                return logits
            chosen = self._rows[:, layer].long()
            others = torch.ones_like(logits).scatter(1, chosen, 0.0)
            return logits - 1e4 * others

        return replay


def record_rollout(model: nn.Sequential, token_ids: np.ndarray) -> np.ndarray:
    """Rows as an engine returns them: its routers' choices on slightly other numbers."""
    rows = []
    x = embed(token_ids).to(torch.bfloat16)
    for layer in (m for m in model if isinstance(m, MoeLayer)):
        logits = x.float() @ layer.router.weight.detach().bfloat16().float().T
        rows.append(logits.topk(LAYOUT.moe_top_k, dim=-1).indices.numpy())
        x = layer(x.float()).detach().to(torch.bfloat16)
    return np.stack(rows, axis=1)[:-1]  # the last token was not fed: [T-1, L, K]


def embed(token_ids: np.ndarray) -> torch.Tensor:
    table = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(1))
    return table[torch.from_numpy(token_ids.astype(np.int64))]


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(MoeLayer() for _ in LAYOUT.moe_layers))
    token_ids = np.random.default_rng(0).integers(0, 1000, 64).astype(np.int32)
    recorded = record_rollout(model, token_ids)
    cache = RoutingCache(LAYOUT)
    with cache.session(weight_version=1) as session:
        session.record(token_ids, recorded, start=0, weight_version=1, num_prefill=32)
        lease = session.lease()
    batch = PackedRows.from_bytes(pack([lease]).tobytes())  # as if it came over the wire
    lease.release()

    replay = Replay(model)
    replay.load(batch[0], token_ids, torch.device("cpu"))
    seen: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, out: seen.append(out.topk(2).indices))
    model(embed(token_ids)).square().mean().backward()
    replay.clear()
    replayed = torch.stack(seen, dim=1).sort(dim=-1).values[:-1].numpy()
    same = (replayed == np.sort(recorded, axis=2)).all()
    gradients = [m.weight.grad for m in model.modules() if isinstance(m, Router)]
    gradient = sum(float(g.norm()) for g in gradients if g is not None)
    print(f"replayed experts equal the recorded ones: {same}; router gradient {gradient:.3g}")


if __name__ == "__main__":
    main()
