"""Configurations: what is accepted, what is refused, and how it is said."""

import re
from pathlib import Path

import pytest

from agent_rl.config.key_pages import config_surface
from agent_rl.config.keys import keys_of
from agent_rl.config.reading import (
    dump_config,
    load_config,
    load_resolved,
)
from agent_rl.config.schema import RunConfig
from agent_rl.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
SURFACE = Path(__file__).with_name("config_surface.txt")


def _problems(folder: Path, text: str, overrides: list[str] | None = None) -> list[str]:
    file = folder / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides or [])
    return caught.value.problems


def _load(folder: Path, text: str, overrides: list[str] | None = None) -> RunConfig:
    file = folder / "config.yaml"
    file.write_text(text)
    return load_config(file, overrides or [])


def test_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert _load(tmp_path, "") == RunConfig()


def test_every_config_in_the_repository_is_valid() -> None:
    files = sorted((REPOSITORY / "configs").glob("*.yaml"))  # of training; eval has its own schema
    assert files
    for file in files:
        load_config(file, on_this_machine=False)  # one needs the SGLang environment


def test_surface_is_frozen() -> None:
    """A changed key, type or default breaks people's files: change the fixture on purpose only."""
    assert config_surface() == SURFACE.read_text().splitlines()


def test_overrides_win_and_are_typed(tmp_path: Path) -> None:
    config = _load(tmp_path, "train: {steps: 3}", ["train.steps=50", "optim.lr=1e-6", "name=x"])
    assert (config.train.steps, config.optim.lr, config.name) == (50, 1e-6, "x")


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "1E-6", ".000001"])
def test_floats_in_every_notation(tmp_path: Path, text: str) -> None:
    assert _load(tmp_path, f"optim: {{lr: {text}, min_lr: 0}}").optim.lr == pytest.approx(1e-6)


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    [problem] = _problems(tmp_path, "routing: {replai: off}")
    assert problem.endswith("routing.replai: unknown key; did you mean routing.replay?")
    assert problem.startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("routing={replai: off}", "override: routing.replai: unknown key"),
        ("routing.replay={a: 1}", "override: routing.replay: got {'a': 1} (dict)"),
        ("routing=null", "override: routing: got None (NoneType), expected a section of keys"),
        ("name='a", 'override: name: got "\'a", not valid YAML: '),
    ],
)
def test_a_fault_below_or_above_an_override_is_told_of_it(
    tmp_path: Path, override: str, fault: str
) -> None:
    [problem] = _problems(tmp_path, "routing: {budget_bytes: 7}", [override])
    assert problem.startswith(fault)


def test_unknown_override_is_refused_not_ignored(tmp_path: Path) -> None:
    [problem] = _problems(tmp_path, "", ["replay.enable=false"])
    assert problem.startswith("override: replay: unknown key")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.capture_routing", "2"),
        ("engine.capture_routing", "yes"),
        ("train.steps", "'7'"),
        ("train.steps", "12:30:00"),
        ("train.steps", "008"),
        ("train.steps", "1.0"),
        ("train.steps", "true"),
        ("train.steps", "null"),
        ("optim.lr", "fast"),
        ("optim.lr", "'1e-6'"),
        ("optim.lr", "."),
        ("name", "3"),
        ("routing.replay", "R3"),
        ("routing", "3"),
    ],
)
def test_wrong_types_are_refused(tmp_path: Path, key: str, value: str) -> None:
    [problem] = _problems(tmp_path, "", [f"{key}={value}"])
    assert problem.startswith(f"override: {key}: got ")
    assert "expected" in problem


@pytest.mark.parametrize("value", [".inf", ".nan", "inf", "nan", "[1.0]", "true", "'1.0'"])
def test_a_float_is_a_finite_number(tmp_path: Path, value: str) -> None:
    [problem] = _problems(tmp_path, "", [f"optim.lr={value}"])
    assert problem.endswith("expected float, above 0")


def test_an_int_may_stand_for_a_float_and_a_list_for_a_tuple(tmp_path: Path) -> None:
    config = _load(tmp_path, "optim: {clip_grad: 2}\nengine: {kind: sglang, urls: ['http://a:1']}")
    assert isinstance(config.optim.clip_grad, float)
    assert config.engine.urls == ("http://a:1",)


def test_a_wrong_item_of_a_list_is_a_fault_of_its_key(tmp_path: Path) -> None:
    [problem] = _problems(tmp_path, "engine: {extra_args: [--a, 1, 2]}")
    assert problem.endswith("engine.extra_args: got 1 (int) in the list, expected a list of str")


@pytest.mark.parametrize(
    "key",
    [
        "tasks.num_train",
        "tasks.num_heldout",
        "sandbox.num_workers",
        "images.max_containers",
        "images.max_pulls",
        "agent.max_turns",
        "agent.max_tokens",
        "engine.max_sessions",
        "engine.num_threads",
        "engine.num_servers",
        "algorithm.group_size",
        "algorithm.groups_per_step",
        "algorithm.dynamic_sampling_rounds",
        "rollout.concurrency",
        "trainer.micro_batch_tokens",
        "trainer.expert_parallel",
        "trainer.num_threads",
        "trainer.num_processes",
        "eval.num_tasks",
        "eval.samples_per_task",
    ],
)
def test_a_size_that_would_fill_the_machine_is_refused(tmp_path: Path, key: str) -> None:
    """One trajectory, session or process of each: 1e8 of them once took 22 GB before they began."""
    problems = _problems(tmp_path, "", [f"{key}=100000000"])
    most = keys_of(RunConfig)[key].limits.rpartition(" ")[2]
    (told,) = [problem for problem in problems if f": {key}: " in problem]
    assert told.startswith(f"override: {key}: got 100000000 (int), expected int")
    assert told.endswith(most)
    assert int(most) < 100_000_000


def test_no_word_of_the_libraries_reaches_a_user(tmp_path: Path) -> None:
    text = "seeed: 1\nname: a/b\nrouting: 3\ntrain: {steps: many, save_every: 0}\nseed: [1]"
    problems = _problems(tmp_path, text, ["optim.lr=-1", "engine.urls=[1]", "eval.num_tasks=???"])
    assert len(problems) == 9
    for problem in problems:
        assert not re.search(r"pydantic|https?:|[Ii]nput should|omegaconf|type=|constr", problem)


def test_all_faults_at_once_one_line_each(tmp_path: Path) -> None:
    text = "seeed: 1\ntrain: {steps: many, save_evry: 3}\noptim: {lr: [1]}"
    problems = _problems(tmp_path, text)
    assert len(problems) == 4
    assert all("\n" not in problem and problem.startswith(str(tmp_path)) for problem in problems)


def test_all_broken_rules_at_once(tmp_path: Path) -> None:
    problems = _problems(
        tmp_path,
        "engine: {capture_routing: false}\nsampling: {top_p: 0.9, temperature: 0}",
        ["algorithm.group_size=1", "sandbox.kind=process", "policy.path=nowhere", "train.steps=0"],
    )
    keys = sorted(problem.split(": ")[1] for problem in problems)
    assert keys == [
        "algorithm.group_size",
        "engine.capture_routing",
        "policy.path",
        "sampling.temperature",
        "sampling.top_p",
        "sandbox.kind",
        "train.steps",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("urls", "['http://a:1']"),
        ("num_servers", "2"),
        ("tensor_parallel", "2"),
        ("device", "cuda"),
        ("weight_transfer", "disk"),
        ("verify_weights", "false"),
        ("start_timeout_s", "5.0"),
        ("extra_args", "['--x']"),
    ],
)
def test_what_only_servers_read_is_refused_for_the_embedded_engine(
    tmp_path: Path, key: str, value: str
) -> None:
    (problem,) = _problems(tmp_path, f"engine: {{kind: local, {key}: {value}}}")
    assert f"engine.{key}: got " in problem
    assert problem.endswith("only read for engine.kind=sglang and vllm")


def test_replay_off_needs_no_capture(tmp_path: Path) -> None:
    config = _load(tmp_path, "engine: {capture_routing: false}\nrouting: {replay: off}")
    assert config.routing.replay == "off"


def test_interpolation_is_resolved(tmp_path: Path) -> None:
    assert _load(tmp_path, "seed: 7\ntasks: {seed: '${seed}'}").tasks.seed == 7


def test_all_broken_interpolations_at_once_with_the_rest(tmp_path: Path) -> None:
    text = "tasks: {seed: '${b.c}'}\nname: '${nobody}'\nengine: {urls: ['${x}']}\ntrain: {steps: a}"
    keys = [problem.split(": ")[1] for problem in _problems(tmp_path, text)]
    assert sorted(keys) == ["engine.urls", "name", "tasks.seed", "train.steps"]


def test_broken_interpolation_is_a_fault(tmp_path: Path) -> None:
    [problem] = _problems(tmp_path, "tasks: {seed: '${b.c}'}")
    assert "b.c" in problem


def test_mandatory_value_left_open_is_a_fault(tmp_path: Path) -> None:
    [problem] = _problems(tmp_path, "train:\n  steps: ???")
    assert problem.endswith("train.steps: no value given, expected int, 1 or more")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: b: c", "not valid YAML"),
        ("- 1", "expected a mapping"),
        ("seed: 1\nseed: 2", "appears twice"),
        ("? [a]\n: 1\n? [a]\n: 2", "appears twice"),
        ("optim: {lr: 1e999}", "1e999 is too large for a float"),
        ("\x00", "not valid YAML"),
    ],
)
def test_unusable_files(tmp_path: Path, text: str, part: str) -> None:
    [problem] = _problems(tmp_path, text)
    assert part in problem


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config("nowhere.yaml")


@pytest.mark.parametrize("override", ["train.steps", "=3", "a b=3", "train..steps=1"])
def test_malformed_override(tmp_path: Path, override: str) -> None:
    [problem] = _problems(tmp_path, "", [override])
    assert "expected section.key=value" in problem


def test_saved_config_reads_back_equal(tmp_path: Path) -> None:
    config = _load(tmp_path, "", ["optim.lr=1e-6", "train.max_wall_s=2.5", "name=a"])
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert load_resolved(tmp_path / "saved.yaml") == config


def test_a_repository_of_the_hub_is_recognised(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, "policy: {path: Qwen/Qwen3-30B-A3B}")
    assert problem.endswith("if it is on the Hugging Face Hub: hf:Qwen/Qwen3-30B-A3B")


def test_fewer_heldout_tasks_than_an_evaluation_may_have_are_all_of_them(tmp_path: Path) -> None:
    config = _load(tmp_path, "tasks: {num_heldout: 24}")
    assert config.eval.num_tasks > config.tasks.num_heldout == 24


def test_parallel_settings_that_do_not_go_together(tmp_path: Path) -> None:
    wanted = {
        "tensor_parallel: 2": "trainer.sequence_parallel: got false, expected true",
        "sequence_parallel: true": "trainer.sequence_parallel: got true, expected false",
        "virtual_pipeline: 3": "trainer.virtual_pipeline: got 3, expected 1 when",
        "virtual_pipeline: 0": "trainer.virtual_pipeline: got 0 (int), expected int, from 1 to",
        "pipeline_parallel: 3, virtual_pipeline: 2": "trainer.virtual_pipeline: got 2, expected",
    }
    for settings, problem in wanted.items():
        (found,) = _problems(tmp_path, f"trainer: {{{settings}}}")
        assert problem in found


def test_a_sandbox_without_its_program_is_a_fault_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problems = _problems(tmp_path, "train: {steps: 0}\nsandbox: {kind: bubblewrap}")
    assert [problem.split(": ", 2)[1] for problem in problems] == ["train.steps", "sandbox.kind"]
    assert "bwrap" in problems[1]
