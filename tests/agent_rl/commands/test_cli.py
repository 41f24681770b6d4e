"""The command line: help, wrong usage and exit codes, as a person meets them."""

import subprocess
import sys
from pathlib import Path

import pytest

from agent_rl.config.suggestions import command_line

REPOSITORY = Path(__file__).parents[3]
CONFIG = str(REPOSITORY / "configs" / "repair_tiny.yaml")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from agent_rl.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_lists_the_commands_with_examples() -> None:
    result = _run("--help")
    assert result.returncode == 0
    for word in ("train", "eval", "rollout", "doctor", "warmstart", "Example", "Exit codes"):
        assert word in result.stdout


@pytest.mark.parametrize("command", ["train", "eval", "rollout", "doctor", "warmstart"])
def test_every_command_has_an_example(command: str) -> None:
    result = _run(command, "--help")
    assert result.returncode == 0
    assert f"agent-rl {command}" in result.stdout


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['agent-rl', '--help']\n"
        "from agent_rl.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('HEAVY', [m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "HEAVY []" in result.stdout


def test_a_wrong_configuration_is_exit_2_with_one_line_a_fault() -> None:
    result = _run("train", CONFIG, "train.stepz=1", "optim.lr=fast")
    assert result.returncode == 2
    assert set(result.stderr.strip().splitlines()) == {
        "error: override: train.stepz: unknown key; did you mean train.steps?",
        "error: override: optim.lr: got 'fast' (str), expected float, above 0",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", CONFIG, "--gpu"),
        ("bench", "trainer", "--rounds", "1"),
        ("bench", "r3", "--min-tokens", "0"),
    ],
)
def test_what_would_be_ignored_or_measure_nothing_is_wrong_usage(
    arguments: tuple[str, ...],
) -> None:
    result = _run(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_train_without_anything_says_what_is_needed() -> None:
    result = _run("train")
    assert result.returncode == 2
    assert "either a configuration file or --resume" in result.stderr


def test_resuming_something_else_is_exit_1(tmp_path: Path) -> None:
    result = _run("train", "--resume", str(tmp_path))
    assert result.returncode == 1
    assert "is no run folder" in result.stderr


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_a_missing_source_is_exit_2(command: str) -> None:
    result = _run(command, "a[red]b")
    assert result.returncode == 2
    expected = "error: a[red]b: no such file or folder (expected a run folder or a YAML config)\n"
    assert result.stderr == expected


def test_a_task_number_out_of_range_is_exit_2() -> None:
    result = _run("rollout", CONFIG, "tasks.num_heldout=5", "eval.num_tasks=5", "--task", "5")
    assert result.returncode == 2
    assert "expected 0 to 4" in result.stderr


@pytest.mark.slow
def test_rollout_shows_an_episode() -> None:
    result = _run("rollout", CONFIG, "tasks.num_heldout=5", "eval.num_tasks=5", "--task", "2")
    assert result.returncode == 0, result.stderr
    for part in (
        "issue",
        "solution.py",
        "turn 1",
        "view",
        "patch",
        "reward",
        "rows fetched per turn",
    ):
        assert part in result.stdout


@pytest.mark.slow
def test_doctor_is_satisfied_here() -> None:
    result = _run("doctor", CONFIG)
    assert result.returncode == 0, result.stdout
    assert "ready" in result.stdout


def test_a_benchmark_configuration_goes_to_its_own_evaluation() -> None:
    config = str(REPOSITORY / "configs" / "eval" / "swebench_verified.yaml")
    result = _run("eval", config, "grading.num_workerz=1")
    assert result.returncode == 2
    assert "did you mean grading.num_workers?" in result.stderr


@pytest.mark.slow
def test_doctor_says_what_a_benchmark_configuration_lacks(tmp_path: Path) -> None:
    config = str(REPOSITORY / "configs" / "eval" / "swebench_verified.yaml")
    changes = ["model.base_url=http://127.0.0.1:1/v1", f"dataset.source={tmp_path}/rows.jsonl"]
    result = _run("doctor", config, *changes)
    assert result.returncode == 1, result.stderr
    missing = result.stdout.split("missing: ")[-1]
    assert "model endpoint, dataset" in missing
    assert "Traceback" not in result.stderr
    assert _run("doctor", config, "grading.num_workerz=1").returncode == 2


@pytest.mark.parametrize("command", ["rollout", "train"])
def test_a_benchmark_configuration_elsewhere_says_where_it_belongs(command: str) -> None:
    config = str(REPOSITORY / "configs" / "eval" / "swebench_verified.yaml")
    result = _run(command, config)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "got the configuration of an evaluation (it has the section model)" in line
    assert line.endswith(f"run it with: {command_line('agent-rl', 'eval', config)}")
    assert "unknown key" not in line


def test_a_training_configuration_with_a_section_too_many_stays_one(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model: {name: a}\ntrain: {steps: 1}\n")
    for command in ("doctor", "eval"):
        result = _run(command, str(config))
        assert result.returncode == 2
        assert "model: unknown key" in result.stderr


@pytest.mark.slow
def test_doctor_says_that_a_configuration_without_keys_is_all_defaults(tmp_path: Path) -> None:
    config = tmp_path / "a[red]b.yaml"
    config.write_text("# nothing yet\n")
    result = _run("doctor", str(config))
    words = " ".join(result.stdout.split())
    assert f"note: {config} has no keys: all defaults" in words


def test_a_server_that_cannot_be_started_is_refused_before_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_RL_ENGINES_DIR", str(tmp_path / "none"))
    config = REPOSITORY / "configs" / "repair_tiny_sglang.yaml"
    result = _run("train", str(config), f"run_root={tmp_path / 'runs'}")
    assert result.returncode == 2
    assert "scripts/engines/install.sh sglang" in result.stderr
    assert not (tmp_path / "runs").exists()
