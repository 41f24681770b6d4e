"""The model that a configuration names."""

from __future__ import annotations

import os
from pathlib import Path

from eval.config import ModelConfig
from eval.models.base import Model
from eval.models.engine import EngineChat
from eval.models.openai_chat import OpenAIChat
from eval.models.scripted import ScriptedChat, load_script


def make_model(config: ModelConfig, system_prompt: str = "") -> Model:
    """Make the model of ``config``. Raises ModelError, ConfigError.

    Args:
        system_prompt: for engines whose renderer puts it in; others find it in the dialogue.
    """
    if config.kind == "scripted":
        return ScriptedChat(load_script(Path(config.script)), config.name or "scripted")
    if config.kind == "engine":
        return _engine_model(config, system_prompt)
    return OpenAIChat(
        config.name,
        config.base_url,
        api_key=os.environ.get(config.api_key_env, ""),
        temperature=config.temperature,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        timeout_s=config.timeout_s,
        max_retries=config.max_retries,
        keep_thinking=config.keep_thinking,
    )


def _engine_model(config: ModelConfig, system_prompt: str) -> Model:
    from agent_rl.config.reading import load_config
    from agent_rl.engines.configured import build_engine
    from agent_rl.model.policies import policy_folder
    from agent_rl.run.parts import RENDERERS

    run = load_config(config.engine)
    policy = policy_folder(run.policy.path)
    has_template = run.agent.renderer == "chat_template"
    if has_template:
        from agent_rl.rollout.template import TemplateRenderer

        limit = run.agent.max_observation_tokens
        renderer = TemplateRenderer.load(policy, limit, system_prompt=system_prompt)
    else:
        renderer = RENDERERS[run.agent.renderer](run, policy)
    return EngineChat(
        build_engine(run, policy),
        renderer,
        name=config.name or run.name,
        max_tokens=run.agent.max_tokens,
        max_new_tokens=min(config.max_new_tokens, run.agent.max_new_tokens),
        temperature=config.temperature,
        seed=run.seed,
        renders_system=has_template,
    )
