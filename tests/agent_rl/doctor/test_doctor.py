"""The doctor names what a configuration lacks, on this machine and before anything starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_rl.config.reading import load_config
from agent_rl.config.schema import ImagesConfig, PolicyConfig, RunConfig, TasksConfig, TrainerConfig
from agent_rl.doctor.budget import budget, model_size
from agent_rl.doctor.check import Check
from agent_rl.doctor.checks import check_config
from agent_rl.doctor.image_checks import check_images
from agent_rl.doctor.known_models import KNOWN_MODELS
from agent_rl.doctor.needs import (
    check_needs,
    check_ports,
    check_trainer_memory,
    gpu_memory,
)
from agent_rl.errors import ConfigError
from agent_rl.model.config_json import read_shape
from agent_rl.model.policies import policy_folder
from agent_rl.model.shape import ModelShape

REPOSITORY = Path(__file__).parents[3]
PRODUCTION = REPOSITORY / "configs" / "train" / "swe_qwen3_30b_a3b.yaml"
NOWHERE = "unix:///nonexistent/docker.sock"


def production(**images: str | bool) -> RunConfig:
    config = load_config(PRODUCTION, on_this_machine=False)
    return replace(config, images=replace(config.images, docker_url=NOWHERE, **images))


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_policy_that_is_not_here_fails_training_and_not_the_doctor() -> None:
    absent = ["policy.path=hf:nobody/absent"]
    with pytest.raises(ConfigError, match="hf download nobody/absent"):
        load_config(PRODUCTION, absent)
    assert load_config(PRODUCTION, absent, on_this_machine=False).policy.path == absent[0][12:]


@pytest.mark.slow
def test_the_command_fails_and_says_what_to_do() -> None:
    command = [sys.executable, "-c", "from agent_rl.cli import main; main()", "doctor"]
    done = subprocess.run(
        [*command, str(PRODUCTION), f"images.docker_url={NOWHERE}", "policy.path=hf:nobody/absent"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 1, done.stderr
    for words in ("hf download nobody/absent", "Docker daemon", "rollout-0", "start Docker"):
        assert words in done.stdout
    assert "missing:" in done.stdout
    assert "Traceback" not in done.stderr


def test_everything_the_production_config_lacks_is_named() -> None:
    found = by_name(list(check_config(production())))
    missing = {name for name, check in found.items() if check.verdict == "missing"}
    assert missing >= {"Docker daemon", "http://rollout-0:30000"}
    if not gpu_memory():
        assert "GPUs for the trainer" in missing
    for check in found.values():
        assert check.verdict == "ok" or check.advice, check


def test_figures_of_the_header_are_those_of_the_doctor() -> None:
    header = PRODUCTION.read_text()
    need = budget(production(), KNOWN_MODELS["Qwen/Qwen3-30B-A3B"])
    assert need.routing_token == 384
    assert f"{need.kv_token_gpu:,} bytes" in header
    for num_bytes in (need.trainer_gpu, need.activations_gpu, need.engine_gpu, need.routing_step):
        assert f"{num_bytes / 2**30:.1f} GiB" in header
    assert f"{need.checkpoint / 2**30:.0f} GiB" in header
    assert f"({need.weights / 2**30:.0f} GiB)" in header


def hf_config(shape: ModelShape) -> Qwen3MoeConfig:
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.dense_width,
        moe_intermediate_size=shape.expert_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.moe_top_k,
        mlp_only_layers=[n for n in range(shape.num_layers) if n not in shape.moe_layers],
        decoder_sparse_step=1,
        tie_word_embeddings=shape.tie_embeddings,
    )
    config.update({"head_dim": shape.head_dim})  # no field of the class: models read it if present
    return config


TIED = ModelShape(
    vocab_size=97,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    dense_width=50,
    expert_width=14,
    num_experts=6,
    moe_top_k=2,
    moe_layers=(1, 2),
    tie_embeddings=True,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
)


@pytest.mark.parametrize("shape", [TIED, *KNOWN_MODELS.values()], ids=["tied", *KNOWN_MODELS])
def test_parameters_are_those_of_the_real_model(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(hf_config(shape))
    names = dict(model.named_parameters())
    experts = sum(p.numel() for name, p in names.items() if ".experts." in name)
    size = model_size(shape)
    assert size.experts == experts
    assert size.total == sum(p.numel() for p in names.values())


def test_optimizer_state_is_divided_only_where_it_is() -> None:
    config = production()
    shape = KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]
    size = model_size(shape)
    rest, experts = size.rest / 4, size.experts / 8
    need = budget(config, shape)
    assert need.trainer_gpu == pytest.approx(rest * (2 + 4 + 12 / 2) + experts * (2 + 4 + 12))
    whole = replace(config, trainer=replace(config.trainer, distributed_optimizer=False))
    assert budget(whole, shape).trainer_gpu == pytest.approx((rest + experts) * 18)


def test_the_embedded_policy_needs_little() -> None:
    found = by_name(list(check_needs(RunConfig())))
    assert {check.verdict for check in found.values()} == {"ok"}
    assert "on CPU" in found["trainer memory"].detail or "GPUs" in found["trainer memory"].detail


ONE_GPU = 141 << 30
FEW = "with a larger trainer.num_processes and trainer.expert_parallel or context_parallel"


@pytest.mark.parametrize(
    ("processes", "gpus", "memory", "verdict", "said", "advised"),
    [
        (1, [], 64 << 30, "ok", ("1 process: ", "; on CPU: no GPU here"), ""),
        (2, [], 64 << 30, "ok", ("2 processes, each ", "; on CPU: no GPU here"), ""),
        (1, [ONE_GPU], 1, "ok", ("1 process: ", "; 1 GPU here, 1 with that much memory"), ""),
        (2, [ONE_GPU] * 3, 1, "ok", ("; 3 GPUs here, 3 with that much memory",), ""),
        (1, [], 1 << 20, "missing", ("; no GPU here, and 0.0 GiB of memory",), "1 GPU of at least"),
        (2, [ONE_GPU, 1], 1, "missing", ("; 2 GPUs here, 1 with that much",), "2 GPUs of at least"),
    ],
)
def test_trainer_memory_reads_right_in_singular_and_plural(
    processes: int, gpus: list[int], memory: int, verdict: str, said: tuple[str, ...], advised: str
) -> None:
    config = RunConfig(trainer=TrainerConfig(num_processes=processes))
    need = budget(config, TIED)
    check = next(check_trainer_memory(config, need, gpus, memory))
    assert check.verdict == verdict
    for words in said:
        assert words in check.detail
    assert check.advice.startswith(advised)
    if verdict == "missing":
        assert check.advice.endswith(FEW)
        assert (" each;" in check.advice) == (processes > 1)


def test_an_unknown_model_that_is_not_here_has_unknown_needs() -> None:
    config = replace(production(), policy=PolicyConfig(path="hf:nobody/nothing"))
    (check,) = check_needs(config)
    assert (check.verdict, check.detail) == ("warning", "unknown without the policy")


def test_a_head_node_that_does_not_answer() -> None:
    config = production()
    trainer = replace(config.trainer, launcher="ray", ray_address="127.0.0.1:1")
    found = by_name(list(check_ports(replace(config, trainer=trainer))))
    assert found["Ray"].verdict == "missing"
    assert "ray start" in found["Ray"].advice


@pytest.mark.parametrize(
    ("content", "verdict", "words"),
    [
        (None, "missing", "no such file"),
        ("{", "missing", "is not json"),
        ('[{"docker_image": "a:1"}]', "missing", "lacks fields"),
        ("[]", "missing", "no task for the split train and heldout: got 0 tasks"),
    ],
)
def test_rows(tmp_path: Path, content: str | None, verdict: str, words: str) -> None:
    file = tmp_path / "rows.json"
    if content is not None:
        file.write_text(content)
    tasks = TasksConfig(kind="r2e_gym", rows=str(file))
    found = [c for c in check_config(replace(production(), tasks=tasks)) if c.name == "tasks.rows"]
    assert [check.verdict for check in found] == [verdict]
    assert words in found[0].detail


def test_a_rollout_beside_the_update_holds_the_rows_of_two_steps() -> None:
    config = RunConfig()
    rows = budget(config, read_shape(policy_folder(config.policy.path))).routing_step
    for overlap, budget_bytes, words in (
        (False, rows, None),
        (False, rows - 1, "; a step whose"),
        (True, 2 * rows, None),
        (True, 2 * rows - 1, "; two steps, held at once, whose"),
    ):
        changed = replace(
            config,
            train=replace(config.train, overlap_rollout=overlap),
            routing=replace(config.routing, budget_bytes=budget_bytes),
        )
        check = by_name(list(check_needs(changed))).get("routing.budget_bytes")
        if check is None or words is None:
            assert (check, words) == (None, None)
        else:
            assert words in check.detail


def test_rows_that_leave_a_split_empty_say_which_and_what_to_change(tmp_path: Path) -> None:
    """The file is there and whole: advice to write it would mislead."""
    file = tmp_path / "rows.json"
    fields = {"problem_statement": "[ISSUE]a[/ISSUE]", "parsed_commit_content": "{}"}
    fields["expected_output_json"] = json.dumps({"test_a": "PASSED"})
    rows = [{"docker_image": f"images/project:{n:04}", **fields} for n in range(6)]
    file.write_text(json.dumps(rows))
    tasks = TasksConfig(kind="r2e_gym", rows=str(file), heldout_fraction=0.01)
    check = by_name(check_config(replace(production(), tasks=tasks)))["tasks.rows"]
    assert check.verdict == "missing"
    assert check.detail.startswith(f"no task for the split heldout: got 6 tasks from {file}")
    assert "into train 6, heldout 0, confirm 0" in check.detail
    words = re.fullmatch(r"set tasks\.heldout_fraction=(\S+), or add rows", check.advice)
    assert words is not None, check.advice
    changed = replace(tasks, heldout_fraction=float(words[1]))
    check = by_name(check_config(replace(production(), tasks=changed)))["tasks.rows"]
    assert (check.verdict, check.detail.endswith(" held out")) == ("ok", True)

    file.write_text(json.dumps(rows[:1]))
    check = by_name(check_config(replace(production(), tasks=tasks)))["tasks.rows"]
    assert check.advice == f"add rows to {file}, or set tasks.rows"


def test_nothing_is_asked_of_docker_without_images() -> None:
    config = RunConfig(images=ImagesConfig(docker_url=NOWHERE))
    assert list(check_images(config)) == []
