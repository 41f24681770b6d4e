"""Every covered family against transformers: values, gradients under forced experts, weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from family_policies import FAMILY_POLICIES, load, write_family
from fixture_types import MakeSamples, MakeTrainer
from safetensors.torch import load_file

from agent_rl.config.schema import TrainerConfig
from agent_rl.engines.http.serving_folder import serving_weights
from agent_rl.model.config_json import read_served_model, read_shape
from agent_rl.model.folders import FolderTensors, read_folder, write_folder
from agent_rl.model.shape import ModelShape
from agent_rl.trainer import cpu_backend
from agent_rl.trainer.model import build_model, transformer_config, wrap_model
from agent_rl.trainer.param_maps import param_maps
from agent_rl.trainer.router_replay import ReplayTable, RouterReplay
from agent_rl.trainer.weights import export_like, export_weights, load_weights

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("process_group")]

BATCH, LENGTH = 3, 24


class Policy:
    """One folder in Megatron and in transformers."""

    def __init__(self, folder: Path) -> None:
        self.shape = read_shape(folder)
        trainer = TrainerConfig(num_threads=1)
        self.model = build_model(self.shape, transformer_config(self.shape, trainer))
        self.maps = param_maps(self.model, self.shape)
        load_weights(self.maps, FolderTensors(folder))
        self.other = load(folder)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 200, (BATCH, LENGTH), generator=generator)

    def logits(self) -> torch.Tensor:
        with cpu_backend.quiet():
            return self.model(self.ids, torch.arange(LENGTH).expand(BATCH, LENGTH), None)

    def replayed(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits with ``rows [B, S, L, K]`` in place of the routers' choice."""
        replay = RouterReplay([self.model], num_experts=self.shape.num_experts, recompute=False)
        order = rows.permute(2, 1, 0, 3).flatten(1, 2)  # [L, N, K], position-major
        real = torch.ones(order.shape[1], dtype=torch.bool)
        replay.put(0, ReplayTable(order, real, ~real))
        with replay.forward(0):
            out = self.logits()
        replay.detach()
        return out

    def force(self, rows: torch.Tensor) -> None:
        """The same in transformers, by its own formula for the gates."""
        gates = [m for name, m in self.other.named_modules() if name.endswith("mlp.gate")]
        assert len(gates) == len(self.shape.moe_layers)
        for slot, gate in enumerate(gates):
            chosen = rows[:, :, slot].flatten(0, 1)
            gate.register_forward_hook(
                lambda module, args, out, chosen=chosen: (
                    out[0],
                    gates_of(self.shape, out[0], chosen),
                    chosen,
                )
            )

    def random_rows(self, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(
            BATCH, LENGTH, len(self.shape.moe_layers), self.shape.num_experts, generator=generator
        )
        return noise.argsort(dim=-1)[..., : self.shape.moe_top_k]


def gates_of(shape: ModelShape, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` gates of chosen experts from live logits, written from the families' formulas."""
    rule = shape.router
    if rule.score == "softmax":
        gates = logits.float().softmax(-1).gather(1, chosen)
    else:
        gates = logits.float().sigmoid().gather(1, chosen)
    return gates / gates.sum(-1, keepdim=True) * rule.scaling if rule.normalise else gates


MakeFamily = Callable[[str], Policy]


@pytest.fixture(scope="module")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> MakeFamily:
    folders: dict[str, Path] = {}

    def policy(name: str) -> Policy:
        if name not in folders:
            folders[name] = write_family(tmp_path_factory.mktemp("family"), name)
        return Policy(folders[name])

    return policy


@pytest.mark.parametrize("name", FAMILY_POLICIES)
def test_logits_equal_transformers(make_family: MakeFamily, name: str) -> None:
    policy = make_family(name)
    with torch.no_grad():
        ours, theirs = policy.logits(), policy.other(policy.ids).logits
    assert float(theirs.std()) > 0.3  # a flat distribution would agree by accident
    assert float((ours - theirs).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", FAMILY_POLICIES)
def test_gradients_with_forced_experts_equal_transformers(
    make_family: MakeFamily, name: str
) -> None:
    """Gates come from the live logits of the recorded experts, under the family's own rule."""
    policy = make_family(name)
    rows = policy.random_rows()
    free = policy.logits().detach()
    policy.force(rows)
    ours, theirs = policy.replayed(rows), policy.other(policy.ids).logits
    assert float((ours.detach() - free).abs().max()) > 0.1  # the rows did something
    assert float((ours - theirs).detach().abs().max()) <= 1e-5
    for logits in (ours, theirs):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), policy.ids[:, 1:].flatten()).backward()
    ours_by_name = export_like(policy.maps, lambda p: p.grad)
    named = dict(policy.other.named_parameters())
    assert set(named) == set(ours_by_name)
    for key, parameter in named.items():
        difference = (ours_by_name[key] - parameter.grad).norm() / parameter.grad.norm()
        assert float(difference) <= 1e-5, key


@pytest.mark.parametrize("name", FAMILY_POLICIES)
def test_weights_come_back_bit_exact(make_family: MakeFamily, tmp_path: Path, name: str) -> None:
    policy = make_family(name)
    weights = export_weights(policy.maps)
    source = dict(policy.other.named_parameters()) | {
        key: value
        for key, value in policy.other.named_buffers()
        if key.endswith("e_score_correction_bias")
    }
    assert set(weights) == set(source)
    for key, tensor in weights.items():
        assert torch.equal(tensor, source[key]), key
    write_folder(tmp_path, weights, policy.shape.names)
    policy.other.config.save_pretrained(tmp_path)
    for key, tensor in load(tmp_path).state_dict().items():
        assert torch.equal(tensor, policy.other.state_dict()[key]), key
    read = read_folder(tmp_path)
    assert all(torch.equal(read[key], tensor) for key, tensor in weights.items())


@pytest.mark.parametrize("name", [n for n in FAMILY_POLICIES if n.startswith(("deep", "glm"))])
def test_the_selection_bias_chooses_and_never_weighs(make_family: MakeFamily, name: str) -> None:
    policy = make_family(name)
    routers = [m for m in policy.model.modules() if hasattr(m, "expert_bias")]
    assert len(routers) == len(policy.shape.moe_layers)
    rows = policy.random_rows()
    with torch.no_grad():
        live, replayed = policy.logits(), policy.replayed(rows)
        for router in routers:
            router.expert_bias.copy_(torch.linspace(1, -1, policy.shape.num_experts))
        assert float((policy.logits() - live).abs().max()) > 0.1
        assert torch.equal(policy.replayed(rows), replayed)


def test_replaying_the_own_choice_changes_nothing(make_family: MakeFamily) -> None:
    for name in FAMILY_POLICIES:
        policy = make_family(name)
        experts = policy.shape.num_experts
        replay = RouterReplay([policy.model], num_experts=experts, recompute=False)
        blank = torch.zeros(BATCH * LENGTH, dtype=torch.bool)
        some = policy.random_rows().permute(2, 1, 0, 3).flatten(1, 2)
        with torch.no_grad():
            live = policy.logits()
            replay.put(0, ReplayTable(some, blank, blank))
            with replay.forward(0, record=True):
                policy.logits()
            own = replay.recorded(0)
            replay.put(1, ReplayTable(own, ~blank, blank))
            with replay.forward(1):
                assert torch.equal(policy.logits(), live), name
        replay.detach()


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen2_moe"])
def test_engines_get_the_names_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_family(tmp_path, name)
    served = serving_weights(read_folder(folder), read_served_model(folder).names)
    own = load_file(folder / "model.safetensors")
    assert set(served) == set(own)
    assert all(torch.equal(served[key], tensor) for key, tensor in own.items())


def test_bfloat16_leaves_the_selection_bias_in_float32(make_family: MakeFamily) -> None:
    policy = make_family("deepseek_v3")
    config = transformer_config(policy.shape, TrainerConfig(dtype="bfloat16", num_threads=1))
    model = build_model(policy.shape, config)
    maps = param_maps(model, policy.shape)
    load_weights(maps, {n: t.detach() for n, t in policy.other.state_dict().items()})
    wrap_model(model, config)
    with torch.no_grad(), cpu_backend.quiet():
        model(policy.ids, torch.arange(LENGTH).expand(BATCH, LENGTH), None)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = policy.other.state_dict()[name]
    assert not torch.equal(bias, bias.bfloat16().float())
    assert torch.equal(export_weights(maps)[name], bias)


def test_no_pass_moves_the_selection_bias(
    tmp_path: Path, make_trainer: MakeTrainer, make_samples: MakeSamples, process_group: None
) -> None:
    """Scoring and the update leave it; the router's weights learn under replay."""
    folder = write_family(tmp_path, "deepseek_v3")
    trainer, samples = make_trainer(folder), make_samples([9, 14], folder=folder)
    before = trainer.publish_weights()
    trainer.score(samples, "off", live_routing=True)
    trainer.score(samples, "r3")
    assert all(torch.equal(t, before[name]) for name, t in trainer.publish_weights().items())
    trainer.step(samples)
    after = trainer.publish_weights()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    biases = {name for name in after if name.endswith("e_score_correction_bias")}
    assert biases == set(after) - moved
    (tmp_path / "saved").mkdir()
    trainer.save(tmp_path / "saved")
    other = make_trainer(folder)
    other.load(tmp_path / "saved")
    assert all(torch.equal(t, after[name]) for name, t in other.publish_weights().items())
