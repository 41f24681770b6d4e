"""``agent-rl train CONFIG`` on rows with images: YAML, a server of scripted answers, Docker."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from bytes_tokenizer import PLAIN, bytes_tokenizer
from docker_fixtures import DOCKER_URL
from r2e_specimens import CALC, SPECIMENS, Specimen, make_image, make_row
from scripted_server import ScriptedServer, running
from transformers import PreTrainedTokenizerFast

from agent_rl.config.schema import TasksConfig
from agent_rl.rollout.group import member_seed
from agent_rl.store.run_folder import read_metrics
from agent_rl.store.trajectories import read_trajectories
from agent_rl.tasks.images import load_tasks, run_label, side_of
from agent_rl.types import TokenIds
from envs.actions import R2EXml, ToolCall
from envs.images.prepare import PREPARED_LABEL
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.ownership import RUN_LABEL
from routing_cache import RowLayout

pytestmark = [pytest.mark.docker, pytest.mark.megatron, pytest.mark.slow]
STEPS = 2
WRITE = R2EXml().write
PROMPTS = "## system\nRepair $workspace.\n\n## user\nIssue: $issue\n"


def pick_heldout() -> tuple[Specimen, float]:
    """A fifth image, and the share of rows held out that takes it and none of the four."""
    for number in range(200):
        fifth = replace(CALC, name=f"calc{number}")
        ids = [s.image.rpartition("/")[2] for s in (*SPECIMENS, fifth)]
        for percent in range(2, 40):
            if [side_of(i, percent / 100) for i in ids] == ["train"] * 4 + ["heldout"]:
                return fifth, percent / 100
    raise AssertionError("no share of held-out rows divides these images")


HELDOUT, FRACTION = pick_heldout()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MoE over bytes with a chat template."""
    from agent_rl.run.warmstart.train import TinyMoEShape, build_tiny_moe

    folder = tmp_path_factory.mktemp("policy")
    bytes_tokenizer(PLAIN).save_pretrained(folder)
    shape = TinyMoEShape(num_layers=2, num_experts=8, moe_top_k=2, max_positions=8192)
    build_tiny_moe(shape, 264, seed=0).save_pretrained(folder)
    return folder


def script(tokenizer: PreTrainedTokenizerFast):
    """Member 0 of each group repairs, member 1 breaks, 2 does nothing, 3 cheats."""
    tasks = {s.image.rpartition("/")[2]: s for s in (*SPECIMENS, HELDOUT)}
    roles = {
        member_seed(0, step, task_id, 0, member) & 0x7FFFFFFF: (tasks[task_id], member)
        for step in range(STEPS + 1)
        for task_id in tasks
        for member in range(4)
    }
    opening = tokenizer("<|im_start|>assistant")["input_ids"]

    def say(prompt: TokenIds, seed: int) -> TokenIds | None:
        if seed not in roles:
            return None
        specimen, member = roles[seed]
        text = tokenizer.decode(prompt.tolist())
        assert f"Issue: {specimen.issue}<|im_end|>" in text
        assert text.startswith("<|im_start|>system\nRepair /testbed.<|im_end|>")
        windows = np.lib.stride_tricks.sliding_window_view(prompt, len(opening))
        turn = int((windows == np.array(opening)).all(axis=1).sum()) - 1
        todo = [*actions(specimen, member), WRITE(ToolCall("finish", {"command": "submit"}))]
        said = tokenizer(todo[turn])["input_ids"]
        return np.array([*said, tokenizer.eos_token_id], np.int32)

    return say


def actions(specimen: Specimen, member: int) -> list[str]:
    path, fixed = next(iter(specimen.fix.items()))

    def bash(command: str) -> str:
        return WRITE(ToolCall("execute_bash", {"cmd": command}))

    repair = f"python3 - <<'END'\nopen({path!r}, 'w', newline='').write({fixed!r})\nEND"
    return {
        0: [bash("git log --all --oneline"), bash(repair)],
        1: [bash(f"echo 'raise ValueError' >> {path}")],
        2: ["just words"],
        3: [bash("ls /r2e_tests"), bash("echo 'import os; os._exit(0)' > conftest.py")],
    }[member]


def configuration(folder: Path, policy: Path, url: str) -> dict[str, object]:
    return {
        "name": "images",
        "run_root": str(folder / "runs"),
        "policy": {"path": str(policy)},
        "tasks": {
            "kind": "r2e_gym",
            "rows": str(folder / "rows.jsonl"),
            "heldout_fraction": FRACTION,
        },
        "sandbox": {"kind": "docker", "num_workers": 2},
        "images": {
            "docker_url": DOCKER_URL,
            "pull": False,
            "max_containers": 4,
            "disk_floor_bytes": 1 << 30,
            "memory_bytes": 512 << 20,
            "max_processes": 128,
            "disk_bytes": 512 << 20,
            "shm_bytes": 16 << 20,
            "max_prepared": 3,
        },
        "agent": {
            "renderer": "chat_template",
            "action_format": "r2e_xml",
            "prompts": str(folder / "prompts.md"),
            "max_turns": 5,
            "max_tokens": 4000,
            "max_new_tokens": 1500,
            "max_observation_tokens": 400,
        },
        "engine": {
            "kind": "sglang",
            "urls": [url],
            "dtype": "float32",
            "max_sessions": 8,
            "verify_weights": False,
        },
        "algorithm": {"group_size": 4, "groups_per_step": 2, "num_mini_steps": 1},
        "rollout": {"concurrency": 4},
        "train": {"steps": STEPS, "mismatch_every": 0, "save_every": 2},
        "eval": {"num_tasks": 1},
    }


def test_train_from_a_file(docker_host: DockerHost, policy: Path, tmp_path: Path) -> None:
    rows = [make_row(s, *make_image(docker_host, s)) for s in (*SPECIMENS, HELDOUT)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "prompts.md").write_text(PROMPTS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(policy)
    layout = RowLayout(num_hidden_layers=2, moe_layers=(0, 1), num_experts=8, moe_top_k=2)
    server = ScriptedServer(script(tokenizer), layout)
    with running(server) as url:
        file = tmp_path / "images.yaml"
        file.write_text(yaml.safe_dump(configuration(tmp_path, policy, url)))
        command = [
            sys.executable,
            "-c",
            "from agent_rl.cli import main; main()",
            "train",
            str(file),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    folder = tmp_path / "runs" / "images"
    check_run(folder)
    assert server.versions == ["1", "2"]
    check_nothing_left(docker_host, folder)


def check_run(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["replayed_fraction"] == 1.0
    # The held-out task has one member a time, and it repairs.
    assert (summary["resolve_rate_before"], summary["resolve_rate_after"]) == (1.0, 1.0)
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [row["reward_mean"] for row in metrics] == [0.25] * STEPS
    assert all(row["num_failed"] == 0 and np.isfinite(row["grad_norm"]) for row in metrics)
    seen: set[str] = set()
    for step in range(1, STEPS + 1):
        found = read_trajectories(folder / "trajectories" / f"step-{step:06d}.parquet")
        assert [row["reward"] for row in found] == [1.0, 0.0, 0.0, 0.0] * 2
        assert {row["status"] for row in found} == {"completed"}
        for row in found:
            present = np.array(row["routed_present"])
            assert present[:-1].all()
            assert not present[-1]
            assert "the fix" not in row["turns"][0]["observation"]
        seen |= {row["task_id"] for row in found}
        for row in (r for r in found if r["member"] == 3):
            assert "No such file" in row["turns"][0]["observation"]
    assert seen == {specimen.image.rpartition("/")[2] for specimen in SPECIMENS}


def check_nothing_left(host: DockerHost, folder: Path) -> None:
    from agent_rl.config.reading import load_resolved

    config = load_resolved(folder / "config.yaml")
    assert host.engine.list_containers(f"{RUN_LABEL}={run_label(config)}") == []
    assert len(host.engine.list_images(PREPARED_LABEL)) == config.images.max_prepared
    assert len(list((folder.parent / "validations").glob("*.json"))) == len(SPECIMENS) + 1


def test_the_sides_do_not_depend_on_the_file(tmp_path: Path) -> None:
    rows = [make_row(s, "base", "fix") for s in (*SPECIMENS, HELDOUT)]
    config = TasksConfig(kind="r2e_gym", rows=str(tmp_path / "r.json"), heldout_fraction=FRACTION)
    (tmp_path / "r.json").write_text(json.dumps(rows))
    one = load_tasks(config)
    (tmp_path / "r.json").write_text(json.dumps(rows[::-1]))
    other = load_tasks(config)
    assert [t.task_id for t in one.train] == [t.task_id for t in other.train]
    assert [t.task_id for t in one.heldout] == [HELDOUT.image.rpartition("/")[2]]
    fewer = load_tasks(replace(config, num_train=2))
    assert [t.task_id for t in fewer.train] == [t.task_id for t in one.train][:2]
    drawn = load_tasks(replace(config, seed=2))
    assert {t.task_id for t in drawn.train} == {t.task_id for t in one.train}
