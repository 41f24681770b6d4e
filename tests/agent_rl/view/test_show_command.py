"""``agent-rl show``: from a run folder to pages that name the prompt."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from agent_rl.commands.show import show_command
from agent_rl.config.schema import PolicyConfig, RunConfig
from agent_rl.model.policies import policy_folder
from agent_rl.rollout.compact_tokenizer import CompactTokenizer
from agent_rl.store.run_folder import RunFolder, RunFolderError
from agent_rl.store.trajectories import write_trajectories
from agent_rl.types import Branch, Group, Status, Trajectory, Turn
from agent_rl.view.run_pages import NoTrajectoriesError


def make_run(root: Path, policy: str, steps: int = 2) -> Path:
    """A run folder with one trajectory a step; its prompt is ``view 3``."""
    folder = RunFolder.create(
        RunConfig(name="run", run_root=str(root), policy=PolicyConfig(path=policy))
    )
    folder.close()
    prompt = CompactTokenizer.load(policy_folder("builtin:tiny_moe")).encode("view 3")
    ids = np.concatenate([prompt, prompt]).astype(np.int32)
    turn = Turn(len(prompt), len(ids), "stop", "submit", "over", 4, 0.5, 0.25)
    trajectory = Trajectory(
        task_id="task",
        group_id="g",
        member=0,
        status=Status.COMPLETED,
        stop_reason="submit",
        reward=1.0,
        branches=[
            Branch(
                token_ids=ids,
                loss_mask=np.arange(len(ids)) >= len(prompt),
                rollout_logprobs=np.zeros(len(ids), dtype=np.float32),
                turns=[turn],
                weight_versions=(1,),
            )
        ],
    )
    for step in range(1, steps + 1):
        write_trajectories(folder.trajectories_file(step), step, [Group("g", "task", [trajectory])])
    return folder.path


def test_the_newest_step_is_shown_with_its_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "builtin:tiny_moe")
    show_command(run, None, [])
    said = capsys.readouterr().out
    assert f"pages: {run / 'pages' / 'index.html'}\n" in said
    assert "of step 2; others: --step, 1 to 2" in said
    assert "step-000001" not in (run / "pages" / "index.html").read_text()
    assert "view 3" in (run / "pages" / "step-000002-00000.html").read_text()


def test_named_steps_go_to_a_named_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path, "builtin:tiny_moe")
    show_command(run, tmp_path / "html", [1])
    assert (tmp_path / "html" / "step-000001-00000.html").is_file()
    assert not (run / "pages").exists()


def test_without_the_policy_the_rest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(policy_folder("builtin:tiny_moe"), gone)
    run = make_run(tmp_path, str(gone))
    shutil.rmtree(gone)
    show_command(run, None, [])
    assert "prompts are left out" in capsys.readouterr().out
    page = (run / "pages" / "step-000002-00000.html").read_text()
    assert "submit" in page
    assert "view 3" not in page


def test_what_is_no_run_or_has_nothing_to_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run folder"):
        show_command(tmp_path, None, [])
    with pytest.raises(NoTrajectoriesError, match="a run folder with trajectories"):
        show_command(make_run(tmp_path, "builtin:tiny_moe", steps=0), None, [])
