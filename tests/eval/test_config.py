"""The suite's configuration: strict keys, rules between them, the files that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.errors import ConfigError
from eval.config import load_suite

CONFIGS = Path(__file__).parents[2] / "configs" / "eval"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_the_files_that_ship_can_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parents[1])
    load_suite(file)
    head = file.read_text().partition("name:")[0]
    assert all(word in head for word in ("Needs:", "Costs:", "Reaches:"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampels=3", "did you mean samples"),
        ("name=a/b", "name: got 'a/b'"),
        ("num_workers=0", "num_workers: got 0 (int), expected int, from 1 to 4096"),
        ("model.kind=scripted", "model.script: got nothing"),
        (
            "model.script=a.json",
            "model.script: got 'a.json', expected '': only read for model.kind",
        ),
        ("model.engine=a.yaml", "only read for model.kind=engine"),
        ("agent.action_format=xml", "expected one of r2e_xml, hermes_json, bash_block"),
        ("agent.action_format=bash_block", "expected shell with bash_block"),
        ("agent.prompts=nope", "expected a file or one of swe"),
        ("model.temperature=-1", "model.temperature: got -1 (int), expected float, 0 or more"),
        ("model.top_p=1.5", "model.top_p: got 1.5 (float), expected float, above 0, at most 1"),
        (
            "dataset.max_instances=-1",
            "dataset.max_instances: got -1 (int), expected int, 0",
        ),
        ("num_workers=100000", "num_workers: got 100000 (int), expected int, from 1 to 4096"),
        ("grading.timeout_s=1.5", "grading.timeout_s: got 1.5 (float), expected int, 1 or more"),
    ],
)
def test_faults_name_the_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_suite(CONFIGS / "swebench_verified.yaml", [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "override", ["top_p=0.9", "keep_thinking=true", "timeout_s=60", "base_url=http://other/v1"]
)
def test_what_a_kind_of_model_does_not_read_is_refused(
    override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parents[1])
    with pytest.raises(ConfigError, match=r"only read for model\.kind=openai"):
        load_suite(CONFIGS / "engine_smoke.yaml", [f"model.{override}"])
