"""Rendering by a model's own chat template, append-only, with a check of the template at start.

The template is rendered with placeholders only. What lies between the placeholders is the markup
around a message; a real prompt is that markup, tokenised once, around the message's own tokens.
So a message that spells a special token stays text, and no completion is ever rendered again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agent_rl.errors import ConfigError
from agent_rl.rollout.chat import check_observation_limit, cut_tokens, strip_stop
from agent_rl.types import TokenIds

ObservationRole = Literal["user", "tool"]
OnRewrite = Literal["append", "refuse"]
Message = Mapping[str, str]

_ISSUE, _ANSWER, _REPLY = "PlaceholderIssue", "PlaceholderAnswer", "PlaceholderReply"
_THINKING = "<think>\nPlaceholderThought\n</think>\n\n"
_CUT_MARK = "\n[… tokens left out …]\n"


@dataclass(frozen=True)
class TemplateReport:
    """Places in which later renderings do not extend what the model saw and said."""

    rewrites: tuple[str, ...]

    @property
    def is_append_only(self) -> bool:
        return not self.rewrites


def check_template(
    tokenizer: PreTrainedTokenizerBase, observation_role: ObservationRole
) -> TemplateReport:
    """Render dialogues of two turns and compare each with prompt + completion + stop token.

    Tried with and without thinking: templates that drop past think blocks, or add an empty one to
    the last answer only, rewrite history. Raises ``ConfigError`` when the template cannot render.
    """
    prompt = _render(tokenizer, [{"role": "user", "content": _ISSUE}])
    rewrites = []
    for name, said in (("thinking", _THINKING + _ANSWER), ("no thinking", _ANSWER)):
        held = prompt + said + _stop_text(tokenizer)
        later = _render(tokenizer, _dialogue(said, observation_role))
        if not later.startswith(held):
            differs = (i for i, (a, b) in enumerate(zip(held, later, strict=False)) if a != b)
            at = next(differs, min(len(held), len(later)))
            rewrites.append(
                f"{name}: the history has {held[at : at + 30]!r}, "
                f"a {observation_role} turn later it is rendered as {later[at : at + 30]!r}"
            )
    return TemplateReport(tuple(rewrites))


class TemplateRenderer:
    """``Renderer`` for models with a chat template.

    Args:
        tokenizer: with a chat template and an end-of-sequence token that closes a turn.
        max_observation_tokens: longer replies keep both ends and get a mark.
        system_prompt: put before the issue when not empty.
        write_user: the user's message around an issue; the issue alone when left out.
        observation_role: whose turn the environment's replies are.
        on_rewrite: what to do when the template rewrites history: build append-only all the same
            (the model then sees its past thinking, unlike in other tools), or refuse.

    Raises:
        ConfigError: no template or stop token, markup that cannot be told from the messages, or
            a rewriting template under ``refuse``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_observation_tokens: int,
        *,
        system_prompt: str = "",
        write_user: Callable[[str], str] = str,
        observation_role: ObservationRole = "user",
        on_rewrite: OnRewrite = "append",
    ) -> None:
        self._tokenizer = tokenizer
        self._write_user = write_user
        self._limit = max_observation_tokens
        self._mark = self._encode(_CUT_MARK)
        check_observation_limit(max_observation_tokens, len(self._mark))
        self.report = check_template(tokenizer, observation_role)
        if self.report.rewrites and on_rewrite == "refuse":
            raise ConfigError(
                [
                    "agent.renderer: the chat template rewrites history; expected an append-only "
                    f"template, or agent.on_rewrite=append. {'; '.join(self.report.rewrites)}"
                ]
            )
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        opening = _render(tokenizer, [*system, {"role": "user", "content": _ISSUE}])
        self._around_issue = self._markup(opening, _ISSUE)
        later = _render(tokenizer, _dialogue(_ANSWER, observation_role))
        _, _, behind = later.partition(_ANSWER)
        closing, stop, following = behind.partition(_stop_text(tokenizer))
        if not stop or closing.strip():
            raise ConfigError(
                [
                    "agent.renderer: the template does not close an answer with the tokenizer's "
                    f"eos token: got {behind[:40]!r}, expected {_stop_text(tokenizer)!r} first"
                ]
            )
        self._around_reply = self._markup(following, _REPLY)

    @classmethod
    def load(
        cls,
        folder: Path,
        max_observation_tokens: int,
        *,
        system_prompt: str = "",
        write_user: Callable[[str], str] = str,
        observation_role: ObservationRole = "user",
        on_rewrite: OnRewrite = "append",
    ) -> TemplateRenderer:
        """Make one from the tokenizer of a model folder."""
        return cls(
            AutoTokenizer.from_pretrained(folder),
            max_observation_tokens,
            system_prompt=system_prompt,
            write_user=write_user,
            observation_role=observation_role,
            on_rewrite=on_rewrite,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (_stop_id(self._tokenizer),)

    def initial(self, observation: str) -> TokenIds:
        before, after = self._around_issue
        return np.concatenate([before, self._encode(self._write_user(observation)), after])

    def observation(self, text: str) -> TokenIds:
        before, after = self._around_reply
        ids = cut_tokens(self._encode(text), self._limit, self._mark, head_share=0.5)
        return np.concatenate([before, ids, after])

    def parse(self, completion: TokenIds) -> str:
        """Return the completion as text, special tokens spelled out; environments read calls."""
        ids = strip_stop(completion, self.stop_token_ids).tolist()
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _markup(self, rendered: str, placeholder: str) -> tuple[TokenIds, TokenIds]:
        """Return the token ids before and after ``placeholder``, special tokens recognised."""
        if rendered.count(placeholder) != 1:
            raise ConfigError(
                [
                    f"agent.renderer: the template shows a message {rendered.count(placeholder)} "
                    f"times, expected once: {rendered[:80]!r}"
                ]
            )
        before, _, after = rendered.partition(placeholder)
        return self._encode(before, special=True), self._encode(after, special=True)

    def _encode(self, text: str, *, special: bool = False) -> TokenIds:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=not special)
        return np.array(encoded["input_ids"], dtype=np.int32)


def _dialogue(said: str, observation_role: ObservationRole) -> list[Message]:
    return [
        {"role": "user", "content": _ISSUE},
        {"role": "assistant", "content": said},
        {"role": observation_role, "content": _REPLY},
    ]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> str:
    if not tokenizer.chat_template:
        raise ConfigError(["agent.renderer: the tokenizer has no chat template, expected one"])
    try:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        roles = [m["role"] for m in messages]
        raise ConfigError(
            [f"agent.renderer: the chat template refuses the roles {roles}: {error}"]
        ) from error
    assert isinstance(text, str)
    return text


def _stop_id(tokenizer: PreTrainedTokenizerBase) -> int:
    stop = tokenizer.eos_token_id
    if not isinstance(stop, int):
        raise ConfigError([f"agent.renderer: got eos_token_id={stop!r}, expected one token id"])
    return stop


def _stop_text(tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.convert_ids_to_tokens(_stop_id(tokenizer))
    assert isinstance(text, str)
    return text
