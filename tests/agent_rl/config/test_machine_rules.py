"""Things that this machine lacks are told before the start, with a command that works here."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from family_policies import write_family

from agent_rl.config.rules import check_rules, check_rules_anywhere
from agent_rl.config.schema import EngineConfig, PolicyConfig, RunConfig, TrainerConfig

REPOSITORY = Path(__file__).parents[3]


def of_key(config: RunConfig, key: str) -> list[str]:
    return [text for found, text in check_rules(config) if found == key]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_server_needs_its_environment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_RL_ENGINES_DIR", str(tmp_path))
    config = RunConfig(engine=EngineConfig(kind=kind))  # type: ignore[arg-type]
    (text,) = of_key(config, "engine.kind")
    python = tmp_path / kind / "bin" / "python"
    assert f"got no {python}; build it with scripts/engines/install.sh {kind}" in text
    assert "AGENT_RL_ENGINES_DIR" in text
    assert "engine.urls" in text
    assert not [key for key, _ in check_rules_anywhere(config) if key == "engine.kind"]
    python.parent.mkdir(parents=True)
    python.touch()
    assert of_key(config, "engine.kind") == []


def test_servers_that_run_elsewhere_need_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_RL_ENGINES_DIR", str(tmp_path))
    remote = RunConfig(engine=EngineConfig(kind="sglang", urls=("http://rollout-0:30000",)))
    assert of_key(remote, "engine.kind") == []
    assert of_key(RunConfig(), "engine.kind") == []


def test_ray_that_is_not_installed_names_its_lock_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    (text,) = of_key(RunConfig(trainer=TrainerConfig(launcher="ray")), "trainer.launcher")
    assert ".venv/bin/pip install -r requirements-cluster.lock" in text


def parallel_faults(policy: Path | None = None, **sizes: int) -> list[tuple[str, str]]:
    """The faults of parallel sizes with the shipped policy or with ``policy``."""
    config = RunConfig(trainer=TrainerConfig(**sizes))  # type: ignore[arg-type]
    if policy is not None:
        config = replace(config, policy=PolicyConfig(path=str(policy)))
    return [fault for fault in check_rules(config) if "divi" in fault[1]]


def policy(folder: Path, name: str, **settings: object) -> Path:
    write_family(folder, name, **settings)
    (folder / "tokenizer.json").touch()
    return folder


def test_parallel_sizes_must_divide_the_policy() -> None:
    faults = parallel_faults(expert_parallel=3, tensor_parallel=4, pipeline_parallel=2)
    expected = "got {}, expected a divisor of the policy's {}"
    assert faults == [
        ("trainer.expert_parallel", expected.format(3, "number of experts (32)")),
        ("trainer.tensor_parallel", expected.format(4, "num_attention_heads (2)")),
        ("trainer.tensor_parallel", expected.format(4, "num_key_value_heads (2)")),
        ("trainer.tensor_parallel", expected.format(4, "vocab_size (214)")),
        ("trainer.pipeline_parallel", expected.format(2, "num_hidden_layers (3)")),
    ]
    assert parallel_faults(expert_parallel=8, pipeline_parallel=3) == []
    ((key, text),) = parallel_faults(pipeline_parallel=3, virtual_pipeline=2)
    assert key == "trainer.virtual_pipeline"
    assert text.endswith("times trainer.pipeline_parallel (3), divides num_hidden_layers (3)")


def test_tensor_ranks_must_divide_the_widths_of_latent_attention(tmp_path: Path) -> None:
    widths = {"q_lora_rank": 48, "kv_lora_rank": 30, "qk_rope_head_dim": 16}
    folder = policy(tmp_path, "deepseek_v3", **widths)
    assert parallel_faults(folder, tensor_parallel=4) == [
        (
            "trainer.tensor_parallel",
            "got 4, expected a divisor of the policy's kv_lora_rank + qk_rope_head_dim (46)",
        )
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_experts": 8,', "config.json: not JSON (Expecting property name"),
        (
            '{"model_type": "llama", "num_hidden_layers": 2}',
            "got a dense model (model_type 'llama')",
        ),
    ],
)
def test_a_policy_that_nobody_can_use_is_a_fault_like_any_other(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "tokenizer.json").touch()
    config = RunConfig(policy=PolicyConfig(path=str(tmp_path)))
    (found,) = of_key(config, "policy.path")
    assert message in found
    assert not [key for key, _ in check_rules_anywhere(config) if key == "policy.path"]


def test_advice_installs_from_this_checkout() -> None:
    """``agent-rl`` in a registry would be whatever somebody put there."""
    named: set[str] = set()
    for folder in ("agent_rl", "eval", "envs", "routing_cache", "configs", "docs"):
        for file in (REPOSITORY / folder).rglob("*"):
            if file.suffix in (".py", ".yaml", ".md"):
                text = file.read_text()
                assert not re.search(r"pip install ['\"]?agent-rl", text), file
                named |= set(re.findall(r"requirements[a-z-]*\.lock", text))
    assert {"requirements-cluster.lock", "requirements-eval.lock"} <= named
    assert all((REPOSITORY / name).is_file() for name in named)
