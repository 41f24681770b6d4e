"""Checkpoints of several ranks: the same state under every layout, whoever wrote them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_policies import load, write_family
from fixture_types import MakePolicy
from sharded_checks import LAYOUTS, held, load_and_continue, save_and_continue, trainer_of

from agent_rl.errors import CheckpointError
from agent_rl.model.folders import INDEX

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

CHECKS = Path(__file__).with_name("sharded_checks.py")
DEADLINE_S = 300
FLOAT32 = [name for name in LAYOUTS if name != "bfloat16"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def root(make_policy: MakePolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every layout saved and loaded; ``policy.txt`` says from which folder."""
    policy = make_policy(
        num_hidden_layers=2, mlp_only_layers=[0], num_experts=8, tie_word_embeddings=False
    )
    latent = write_family(tmp_path_factory.mktemp("latent"), "deepseek_v3, yarn")
    root = tmp_path_factory.mktemp("sharded")
    (root / "policy.txt").write_text(str(policy))
    torch.set_num_threads(1)
    save_and_continue(policy, root / "one", "one", keep=True)
    save_and_continue(latent, root / "latent" / "one", "one", keep=True)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CHECKS), str(policy), str(latent), str(root)],
            env={**os.environ, **rendezvous, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    for source in FLOAT32[1:]:
        load_and_continue(policy, root, "one", source, keep=True)
    load_and_continue(latent, root / "latent", "one", "tensor", keep=True)
    return root


def same(first: Path, second: Path) -> None:
    one, other = torch.load(first), torch.load(second)
    assert set(one) == set(other)
    assert {key.partition("/")[0] for key in one} >= {"weights", "exp_avg", "exp_avg_sq"}
    differing = [key for key in one if not torch.equal(one[key], other[key])]
    assert differing == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_continues_bit_identically(root: Path, layout: str) -> None:
    if layout == "one":
        policy = Path((root / "policy.txt").read_text())
        load_and_continue(policy, root, "one", "one", keep=True)
    same(root / layout / "saved.pt", root / layout / f"loaded-{layout}.pt")
    same(root / layout / "continued.pt", root / layout / f"continued-{layout}.pt")
    moved = torch.load(root / layout / "saved.pt"), torch.load(root / layout / "continued.pt")
    assert not torch.equal(moved[0]["weights/lm_head.weight"], moved[1]["weights/lm_head.weight"])


@pytest.mark.parametrize(
    ("layout", "source"),
    [
        *(("one", name) for name in FLOAT32[1:]),
        *((name, "one") for name in FLOAT32[1:]),
        ("tensor", "expert"),
        ("expert", "pipeline"),
    ],
)
def test_another_layout_holds_the_same_bits_and_goes_on_alike(
    root: Path, layout: str, source: str
) -> None:
    goes_on_alike(root, layout, source)


@pytest.mark.parametrize(("layout", "source"), [("one", "tensor"), ("tensor", "one")])
def test_latent_attention_goes_on_alike_with_and_without_tensor_parallelism(
    root: Path, layout: str, source: str
) -> None:
    goes_on_alike(root / "latent", layout, source)
    norms_agree(root / "latent", layout, source)


def goes_on_alike(root: Path, layout: str, source: str) -> None:
    same(root / source / "saved.pt", root / layout / f"loaded-{source}.pt")
    ours = torch.load(root / layout / f"continued-{source}.pt")
    theirs = torch.load(root / source / "continued.pt")
    for key, tensor in theirs.items():
        # One Adam step moves a weight by about the learning rate, whatever rounding did to it.
        limit = 3e-3 if key.startswith("weights/") else 1e-4 * float(tensor.abs().max()) + 1e-9
        assert float((ours[key] - tensor).abs().max()) <= limit, key


@pytest.mark.parametrize("layout", FLOAT32[1:])
def test_the_gradient_norm_that_clips_does_not_depend_on_the_layout(
    root: Path, layout: str
) -> None:
    """Tensor parts on every rank and whole experts on each of them count exactly once."""
    norms_agree(root, layout, "one")


def norms_agree(root: Path, *layouts: str) -> None:
    ours, theirs = (json.loads((root / name / "grad_norms.json").read_text()) for name in layouts)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_two_ranks_share_the_writing(root: Path) -> None:
    for layout in ("spread", "expert", "tensor", "pipeline"):
        folder = root / layout / "checkpoint"
        sizes = [file.stat().st_size for file in sorted(folder.glob("model-*.safetensors"))]
        state = [f.stat().st_size for f in sorted((folder / "trainer").glob("optimizer-*"))]
        assert len(sizes) == len(state) == 2
        assert min(sizes) > 0.2 * max(sizes), layout
        assert min(state) > 0.2 * max(state), layout
        alone = (root / "one" / "checkpoint" / "model.safetensors").stat().st_size
        assert sum(sizes) < 1.1 * alone  # every tensor once


@pytest.mark.parametrize("layout", FLOAT32)
def test_transformers_loads_the_folder(root: Path, layout: str) -> None:
    folder = root / layout / "checkpoint"
    saved = torch.load(root / layout / "saved.pt")
    parameters = dict(load(folder).named_parameters())
    assert {f"weights/{name}" for name in parameters} == {k for k in saved if "weights/" in k}
    assert all(torch.equal(p, saved[f"weights/{name}"]) for name, p in parameters.items())
    if layout != "one":
        index = json.loads((folder / INDEX).read_text())
        assert {file.name for file in folder.glob("model-*")} == set(index["weight_map"].values())


def test_a_missing_part_of_the_state_is_named(root: Path, tmp_path: Path) -> None:
    policy = Path((root / "policy.txt").read_text())
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(root / "expert" / "checkpoint"), str(copy)], check=True)
    (copy / "trainer" / "optimizer-00001.safetensors").unlink()
    trainer = trainer_of(policy, "one")
    before = held(trainer)
    with pytest.raises(CheckpointError, match="incomplete"):
        trainer.load(copy)
    after = held(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainer.close()
