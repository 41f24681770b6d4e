"""Actions of a model: tools, the grammars that write calls of them, and prompts that teach both."""

from __future__ import annotations

from collections.abc import Callable

from envs.actions.calls import Argument, CallError, Parameter, ParsedAction, ToolCall, ToolSpec
from envs.actions.grammars.action_format import ActionFormat
from envs.actions.grammars.bash_block import BashBlock
from envs.actions.grammars.hermes import HermesJson
from envs.actions.grammars.r2e_xml import R2EXml
from envs.actions.observation import head_and_tail, model_view
from envs.actions.prompts import Prompts, load_prompts
from envs.actions.tool_specs import R2E_TOOLS, SHELL_TOOLS, TOOL_SETS

FORMATS: dict[str, Callable[[], ActionFormat]] = {
    "r2e_xml": R2EXml,
    "hermes_json": HermesJson,
    "bash_block": BashBlock,
}

__all__ = [
    "FORMATS",
    "R2E_TOOLS",
    "SHELL_TOOLS",
    "TOOL_SETS",
    "ActionFormat",
    "Argument",
    "BashBlock",
    "CallError",
    "HermesJson",
    "Parameter",
    "ParsedAction",
    "Prompts",
    "R2EXml",
    "ToolCall",
    "ToolSpec",
    "head_and_tail",
    "load_prompts",
    "model_view",
]
