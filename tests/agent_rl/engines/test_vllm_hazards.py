"""Settings of a vLLM server under which rows or log-probs are not the policy's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agent_rl.engines.vllm.flags import find_hazards


def server_config(section: str = "", key: str = "", value: object = None) -> dict[str, Any]:
    """A safe ``vllm_config``, with one setting changed."""
    config: dict[str, Any] = {
        "model_config": {"logprobs_mode": "processed_logprobs"},
        "cache_config": {"enable_prefix_caching": True, "kv_offloading_size": None},
        "parallel_config": {"enable_eplb": False},
        "speculative_config": None,
        "kv_transfer_config": None,
    }
    if key:
        config[section][key] = value
    elif section:
        config[section] = value
    return config


def test_a_safe_server_has_none() -> None:
    assert list(find_hazards(server_config())) == []


@pytest.mark.parametrize(
    ("section", "key", "value", "told"),
    [
        ("parallel_config", "enable_eplb", True, "--enable-eplb: .*physical experts"),
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode: .*temperature"),
        ("cache_config", "kv_offloading_size", 4, "--kv-offloading-size: "),
        ("cache_config", "enable_prefix_caching", False, "--enable-prefix-caching: "),
        ("speculative_config", "", {"method": "ngram"}, "--speculative-config: "),
        ("kv_transfer_config", "", {"kv_role": "kv_both"}, "--kv-transfer-config: "),
    ],
)
def test_an_unsafe_setting_is_named_alone(section: str, key: str, value: object, told: str) -> None:
    (line,) = find_hazards(server_config(section, key, value))
    assert re.match(told, line)
