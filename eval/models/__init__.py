"""Models under evaluation: an endpoint, one of our engines, or a script."""

from __future__ import annotations

from eval.models.base import ChatModel, ChatSpeaker, Message, Model
from eval.models.engine import EngineChat
from eval.models.openai_chat import OpenAIChat
from eval.models.scripted import ScriptedChat, load_script

__all__ = [
    "ChatModel",
    "ChatSpeaker",
    "EngineChat",
    "Message",
    "Model",
    "OpenAIChat",
    "ScriptedChat",
    "load_script",
]
