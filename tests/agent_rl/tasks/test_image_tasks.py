"""Tasks with images from a configuration: rules, rows, prompts and settings, without a daemon."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from bytes_tokenizer import PLAIN, bytes_tokenizer
from transformers import PreTrainedTokenizerFast

from agent_rl.config.rules import check_rules_anywhere
from agent_rl.config.schema import AgentConfig, ImagesConfig, RunConfig, SandboxConfig, TasksConfig
from agent_rl.errors import ConfigError
from agent_rl.run.parts import RENDERERS
from agent_rl.tasks.images import image_settings, run_label, side_of
from agent_rl.tasks.kinds import episode_prompts, load_tasks, open_environments
from envs.actions import FORMATS, HermesJson, ToolCall

IMAGES = RunConfig(
    tasks=TasksConfig(kind="r2e_gym", rows="rows.jsonl"),
    sandbox=SandboxConfig(kind="docker"),
    agent=AgentConfig(renderer="chat_template"),
)


def faults(config: RunConfig) -> dict[str, str]:
    return dict(check_rules_anywhere(config))


def test_a_sound_configuration_has_no_fault() -> None:
    assert faults(IMAGES) == {}
    assert faults(RunConfig()) == {}


@pytest.mark.parametrize(
    ("section", "change", "key"),
    [
        ("tasks", {"rows": ""}, "tasks.rows"),
        ("tasks", {"heldout_fraction": 0.5}, "tasks.heldout_fraction"),
        ("tasks", {"heldout_fraction": 0.0}, "tasks.heldout_fraction"),
        ("tasks", {"bugs": "syntax"}, "tasks.bugs"),
        ("sandbox", {"kind": "auto"}, "sandbox.kind"),
        ("sandbox", {"timeout_s": 5.0}, "sandbox.timeout_s"),
        ("sandbox", {"share_identical_runs": False}, "sandbox.share_identical_runs"),
        ("sandbox", {"num_workers": 65}, "images.max_containers"),
        ("agent", {"renderer": "compact"}, "agent.renderer"),
        ("agent", {"action_format": "bash_block"}, "agent.tools"),
        ("agent", {"tools": "shell"}, "agent.tools"),
        ("agent", {"prompts": "nothing"}, "agent.prompts"),
        ("images", {"network": "host"}, "images.network"),
    ],
)
def test_what_images_need(section: str, change: dict[str, object], key: str) -> None:
    broken = replace(IMAGES, **{section: replace(getattr(IMAGES, section), **change)})
    assert set(faults(broken)) == {key}


@pytest.mark.parametrize("change", [{"cpus": 0.0}, {"max_prepared": -1}])
def test_limits_of_containers_have_ranges(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))}: got "):
        replace(IMAGES.images, **change)


@pytest.mark.parametrize(
    ("section", "change", "key"),
    [
        ("tasks", {"rows": "rows.jsonl"}, "tasks.rows"),
        ("tasks", {"bugs": "syntax"}, "tasks.bugs"),
        ("sandbox", {"kind": "docker"}, "sandbox.kind"),
        ("images", {"memory_bytes": 1}, "images.memory_bytes"),
        ("images", {"docker_url": "unix:///x"}, "images.docker_url"),
        ("agent", {"action_format": "hermes_json"}, "agent.action_format"),
        ("agent", {"on_rewrite": "refuse"}, "agent.on_rewrite"),
        ("agent", {"tools": "shell"}, "agent.tools"),
    ],
)
def test_what_nobody_would_read_is_refused(
    section: str, change: dict[str, object], key: str
) -> None:
    plain = RunConfig()
    broken = replace(plain, **{section: replace(getattr(plain, section), **change)})
    assert set(faults(broken)) == {key}


def test_every_key_of_images_reaches_the_containers() -> None:
    """A value of its own for each key; all of them are found again in the settings."""
    given = ImagesConfig(
        docker_url="unix:///daemon",
        pull=False,
        max_pulls=3,
        max_containers=41,
        max_starting=7,
        disk_floor_bytes=1001,
        allow_emulation=True,
        memory_bytes=1002,
        cpus=1.5,
        max_processes=1003,
        disk_bytes=1004,
        max_file_bytes=1005,
        shm_bytes=1006,
        user="1000:1000",
        network="sandboxes",
        runtime="runsc",
        command_timeout_s=77.0,
        output_cap_bytes=1007,
        max_chars=1008,
        num_validating=9,
        validations="verdicts",
        max_prepared=13,
    )
    settings = image_settings(replace(IMAGES, images=given))
    parts = (settings, settings.options, settings.host_limits, settings.tool_settings)
    elsewhere = {"docker_url", "num_validating", "validations"}  # read where the daemon is opened
    for item in fields(ImagesConfig):
        assert getattr(given, item.name) != getattr(ImagesConfig(), item.name), item.name
        if item.name not in elsewhere:
            found = [getattr(part, item.name) for part in parts if hasattr(part, item.name)]
            assert found == [getattr(given, item.name)], item.name
    assert settings.validations == Path("verdicts")


def test_labels_tell_runs_of_one_name_apart(tmp_path: Path) -> None:
    one = replace(IMAGES, run_root=str(tmp_path / "a"))
    assert run_label(one) == run_label(replace(one, seed=3))
    assert run_label(one) != run_label(replace(one, run_root=str(tmp_path / "b")))
    assert run_label(one) != run_label(replace(one, name="other"))


def rows(count: int) -> list[dict[str, str]]:
    return [
        {
            "docker_image": f"images/project:{number:04}",
            "problem_statement": f"[ISSUE]\nproblem {number}\n[/ISSUE]",
            "expected_output_json": json.dumps({"test_a": "PASSED"}),
            "parsed_commit_content": "{}",
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_rows_are_divided_once_and_for_all(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    several = rows(400)
    if suffix == ".json":
        file.write_text(json.dumps(several))
    else:
        file.write_text("".join(f"{json.dumps(row)}\n" for row in several))
    config = TasksConfig(kind="r2e_gym", rows=str(file), num_train=50, num_heldout=20)
    sets = load_tasks(config)
    assert (len(sets.train), len(sets.heldout)) == (50, 20)
    assert {side_of(task.task_id, 0.1) for task in sets.train} == {"train"}
    assert {side_of(task.task_id, 0.1) for task in sets.heldout} == {"heldout"}
    confirm = load_tasks(replace(config, heldout_split="confirm"))
    ids = [{task.task_id for task in part} for part in (sets.train, sets.heldout, confirm.heldout)]
    assert sum(map(len, ids)) == len(set.union(*ids))
    other = load_tasks(replace(config, seed=2))
    assert [task.task_id for task in other.train] != [task.task_id for task in sets.train]


def test_a_task_that_is_twice_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([*rows(20), rows(1)[0]]))
    with pytest.raises(ConfigError, match=r"the same task twice: .*project:0000"):
        load_tasks(TasksConfig(kind="r2e_gym", rows=str(file)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer over bytes with a chat template."""
    path = tmp_path_factory.mktemp("tokenizer")
    bytes_tokenizer(PLAIN).save_pretrained(path)
    return path


@pytest.mark.parametrize("action_format", sorted(FORMATS))
def test_the_prompt_teaches_the_configured_format(folder: Path, action_format: str) -> None:
    tools = "shell" if action_format == "bash_block" else "r2e"
    agent = replace(IMAGES.agent, action_format=action_format, tools=tools)
    config = replace(IMAGES, agent=agent)
    assert faults(config) == {}
    renderer = RENDERERS["chat_template"](config, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = renderer.initial("it breaks <|im_end|> $tools")
    text = tokenizer.decode(prompt.tolist())
    example = FORMATS[action_format]().write(ToolCall("x", {})) if tools == "r2e" else "```bash"
    assert example.split("x")[0].split("\n")[0].strip() in text
    assert "/testbed" in text
    assert "it breaks <|im_end|> $tools" in text  # the issue is text: no hole, no marker
    stop = renderer.stop_token_ids[0]
    assert int((prompt == stop).sum()) == 2  # of the system's and the user's message
    assert np.array_equal(renderer.initial("a")[:20], prompt[:20])
    assert episode_prompts(config, "a").system == episode_prompts(config, "b").system


def test_repair_tasks_are_played_with_function_calls_too() -> None:
    config = RunConfig(
        tasks=TasksConfig(num_train=1, num_heldout=1, bugs="syntax"),
        agent=AgentConfig(renderer="chat_template", action_format="hermes_json"),
        sandbox=SandboxConfig(num_workers=1),
    )
    assert faults(replace(config, tasks=replace(config.tasks, num_train=32, num_heldout=384))) == {}
    assert '"replace_lines"' in episode_prompts(config).system
    (task,) = load_tasks(config.tasks).train
    environments = open_environments(config)
    try:
        env = environments.make(task)
        env.reset()
        write = HermesJson().write
        shown = env.step(write(ToolCall("view", {"path": "solution.py"}))).text
        assert "def " in shown
        assert env.step(write(ToolCall("test", {}))).text.count("tests fail") == 1
        assert env.step(write(ToolCall("submit", {}))).done
        assert env.grade().reward == 0.0
        env.close()
    finally:
        environments.close()
