"""The one reader of a ``config.json``: shapes for the trainer, layouts for any engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_policies import FAMILY_POLICIES, write_family
from transformers import AutoConfig

from agent_rl.errors import ConfigError
from agent_rl.model.config_json import read_served_model, read_shape
from agent_rl.model.families import FAMILIES

ANY = {"num_hidden_layers": 6, "num_experts_per_tok": 2, "vocab_size": 9, "model_type": "other_moe"}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change(folder: Path, **changes: Any) -> Path:
    """Change fields of the configuration that lies in ``folder``."""
    return write(folder, json.loads((folder / "config.json").read_text()) | changes)


def test_every_family_has_a_policy() -> None:
    assert {kind for kind, _ in FAMILY_POLICIES.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "moe_layers"),
    [
        ("deepseek_v3", (1, 2)),
        ("deepseek_v3, plain queries", (2,)),
        ("qwen3_moe, dense by list", (1, 3)),
        ("qwen3_moe, dense by step", (1, 3)),
        ("mixtral", (0, 1, 2)),
    ],
)
def test_rows_follow_the_dense_layers(
    tmp_path: Path, name: str, moe_layers: tuple[int, ...]
) -> None:
    layout = read_shape(write_family(tmp_path, name)).row_layout
    assert layout.moe_layers == moe_layers
    assert layout.num_hidden_layers == FAMILY_POLICIES[name][1]["num_hidden_layers"]


@pytest.mark.parametrize("name", FAMILY_POLICIES)
def test_an_engine_gets_the_trainer_s_layout(tmp_path: Path, name: str) -> None:
    """Also of quantised weights, and where the family is not known by its name."""
    shape = read_shape(write_family(tmp_path, name))
    known = read_served_model(tmp_path)
    assert (known.layout, known.vocab_size) == (shape.row_layout, shape.vocab_size)
    assert (known.model_type, known.names) == (shape.family, shape.names)
    assert known.tie_embeddings == shape.tie_embeddings
    change(tmp_path, quantization_config={"quant_method": "fp8"})
    assert read_served_model(tmp_path) == known
    with pytest.raises(ConfigError, match="quantization_config: not covered"):
        read_shape(tmp_path)
    change(tmp_path, model_type="other_moe")
    assert read_served_model(tmp_path).layout == known.layout


@pytest.mark.parametrize(
    ("config", "moe_layers"),
    [
        ({"num_experts": 8}, (0, 1, 2, 3, 4, 5)),
        ({"num_experts": 8, "decoder_sparse_step": 2}, (1, 3, 5)),
        ({"num_experts": 8, "mlp_only_layers": [0, 3]}, (1, 2, 4, 5)),
        ({"n_routed_experts": 8, "first_k_dense_replace": 2, "moe_layer_freq": 1}, (2, 3, 4, 5)),
        ({"n_routed_experts": 8, "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"num_local_experts": 8, "moe_layer_freq": [0, 1, 1, 0, 0, 1]}, (1, 2, 5)),
    ],
)
def test_layouts_of_families_that_the_trainer_does_not_cover(
    tmp_path: Path, config: dict[str, Any], moe_layers: tuple[int, ...]
) -> None:
    for whole in (ANY | config, {"model_type": "sees", "text_config": ANY | config}):
        model = read_served_model(write(tmp_path, whole))
        assert model.layout.moe_layers == moe_layers
        assert (model.layout.num_experts, model.layout.moe_top_k, model.vocab_size) == (8, 2, 9)
        with pytest.raises(ConfigError, match="model_type not covered"):
            read_shape(tmp_path)


@pytest.mark.parametrize("read", [read_shape, read_served_model])
def test_a_model_without_a_router_is_refused_as_what_it_is(tmp_path: Path, read: Any) -> None:
    """A dense family, and one whose layers are all dense."""
    with pytest.raises(ConfigError, match=r"dense model \(model_type 'other_moe'\).*no router"):
        read(write(tmp_path, ANY))
    write_family(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match=r"dense model \(model_type 'qwen3_moe'\)"):
        read(change(tmp_path, mlp_only_layers=[0, 1, 2]))


@pytest.mark.parametrize("read", [read_shape, read_served_model])
def test_what_is_no_configuration(tmp_path: Path, read: Any) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json, got="):
        read(tmp_path)
    for text, message in (("{", "not JSON"), ("[]", "got a list, expected a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read(tmp_path)


def test_a_step_between_moe_layers_is_heeded_by_servers_alone(tmp_path: Path) -> None:
    write_family(tmp_path, "deepseek_v3", num_hidden_layers=5)
    change(tmp_path, moe_layer_freq=2)
    assert read_served_model(tmp_path).layout.moe_layers == (2, 4)
    with pytest.raises(ConfigError, match="moe_layer_freq: not covered"):
        read_shape(tmp_path)


def test_all_faults_are_named(tmp_path: Path) -> None:
    write_family(tmp_path, "qwen3_moe")
    change(tmp_path, attention_bias=True, quantization_config={"quant_method": "fp8"})
    change(tmp_path, vocab_size=None)
    with pytest.raises(ConfigError) as caught:
        read_shape(tmp_path)
    assert len(caught.value.problems) == 3
    change(tmp_path, model_type="gpt2")
    with pytest.raises(ConfigError, match=r"got='gpt2' expected=one of .*'deepseek_v3'.*CONTRIB"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek_v3", {"topk_group": 1}, "half of num_experts_per_tok"),
        ("deepseek_v3", {"n_group": None}, "n_group: missing"),
        ("deepseek_v3", {"topk_group": None}, "topk_group: missing"),
        ("deepseek_v3", {"routed_scaling_factor": None}, "routed_scaling_factor: missing"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok: not covered"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok: not covered"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("mixtral", {"sliding_window": 16}, "sliding_window"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ("glm4_moe", {"hidden_size": "64"}, "hidden_size"),
    ],
)
def test_what_would_be_computed_differently_is_refused(
    tmp_path: Path, name: str, changes: dict, message: str
) -> None:
    write_family(tmp_path, name)
    with pytest.raises(ConfigError, match=message):
        read_shape(change(tmp_path, **changes))


@pytest.mark.parametrize("name", FAMILY_POLICIES)
def test_an_absent_key_means_what_transformers_takes_or_is_refused(
    tmp_path: Path, name: str
) -> None:
    """transformers, asked to write the configuration again, spells its own default out."""
    write_family(tmp_path, name)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    rope = whole["rope_parameters"]
    cuts = {key: {k: v for k, v in whole.items() if k != key} for key in whole} | {
        f"rope_parameters.{key}": whole
        | {"rope_parameters": {k: v for k, v in rope.items() if k != key}}
        for key in rope
    }
    refused = set[str]()
    for key in sorted(set(cuts) - {"model_type", "rope_parameters.rope_type"}):
        path.write_text(json.dumps(cuts[key]))
        try:
            got = read_shape(tmp_path)
        except ConfigError as error:
            assert "missing" in str(error)  # noqa: PT017 (an absent key may also be fine)
            refused.add(key)
            continue
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "spelt")
        assert got == read_shape(tmp_path / "spelt"), key
    assert {"rope_parameters.rope_theta", "hidden_size", "num_experts_per_tok"} <= refused
    assert not {"norm_topk_prob", "tie_word_embeddings", "head_dim"} & refused
