"""A model that says what a script says: for tests, demonstrations and checks of a set-up."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from agent_rl.rollout.episode import Answer
from envs.actions import Prompts
from eval.errors import ModelError
from eval.models.base import ChatSpeaker, Message

ANY = "*"
Script = Mapping[str, Sequence[str]]


class ScriptedChat:
    """Replies in order, by instance; ``*`` stands for instances that have none of their own.

    Example:
        >>> ScriptedChat({"*": ["```bash\\nsubmit\\n```"]}).name
        'scripted'
    """

    def __init__(self, script: Script, name: str = "scripted") -> None:
        self._script, self._name = script, name
        self._said: dict[str, int] = defaultdict(int)

    @property
    def name(self) -> str:
        return self._name

    async def check(self) -> None:
        if not self._script:
            raise ModelError("the script is empty: expected replies by instance, or for '*'")

    def speaker(self, episode: str, prompts: Prompts) -> ChatSpeaker:
        return ChatSpeaker(self, episode, prompts)

    async def reply(self, episode: str, messages: Sequence[Message]) -> Answer:
        instance = episode.rpartition("/")[0] or episode
        lines = self._script.get(instance, self._script.get(ANY, ()))
        number = self._said[episode]
        if number >= len(lines):
            raise ModelError(
                f"the script of {instance} is over: got turn {number + 1} of {len(lines)}"
            )
        self._said[episode] += 1
        words = sum(len(message.content.split()) for message in messages)
        return Answer(lines[number], words, len(lines[number].split()))

    def trouble(self, episode: str) -> str:
        return ""

    async def end_episode(self, episode: str) -> None:
        self._said.pop(episode, None)

    async def aclose(self) -> None:
        return None


def load_script(file: Path) -> Script:
    """Read a JSON file of replies by instance id, or ``*``. Raises ModelError."""
    try:
        loaded = cast(object, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelError(f"no script: got={error} expected JSON in {file}") from error
    script = cast("dict[str, object]", loaded) if isinstance(loaded, dict) else {}
    for replies in script.values():
        items = cast("list[object]", replies) if isinstance(replies, list) else [None]
        if not all(isinstance(item, str) for item in items):
            raise ModelError(
                f"{file} is no script: expected an instance's replies as a list of text"
            )
    if not script:
        raise ModelError(f"{file} is no script: expected an object of lists")
    return cast(Script, script)
