"""Prompts as data: a text file with ``## system`` and ``## user`` parts and ``$name`` holes."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envs.errors import TaskError

_FOLDER = Path(__file__).parent / "prompts"
_PART = re.compile(r"^## (system|user)[ \t]*\n", re.MULTILINE)
HOLES = ("tools", "issue", "workspace")


@dataclass(frozen=True)
class Prompts:
    """System and user prompt of an episode, with holes for ``HOLES``."""

    system: str
    user: str

    def fill(self, values: Mapping[str, str]) -> Prompts:
        """Fill the holes of both parts. ``values`` must name every hole that is used."""
        return Prompts(
            string.Template(self.system).substitute(values),
            string.Template(self.user).substitute(values),
        )


def load_prompts(name_or_path: str) -> Prompts:
    """Read prompts by name (a file that ships) or by path. Raises ``TaskError``."""
    shipped = _FOLDER / f"{name_or_path}.md"
    path = shipped if shipped.is_file() else Path(name_or_path)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in _FOLDER.glob("*.md")))
        raise TaskError(f"no prompts: got {name_or_path!r}, expected a file or one of {names}")
    pieces = _PART.split(path.read_text(encoding="utf-8"))
    parts = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    if set(parts) != {"system", "user"}:
        raise TaskError(f"{path}: got parts {sorted(parts)}, expected '## system' and '## user'")
    prompts = Prompts(parts["system"].strip(), parts["user"].strip())
    try:
        prompts.fill(dict.fromkeys(HOLES, ""))
    except (KeyError, ValueError) as error:
        allowed = ", ".join(f"${hole}" for hole in HOLES)
        raise TaskError(f"{path}: bad hole {error}; expected only {allowed}, $$ for $") from error
    return prompts
