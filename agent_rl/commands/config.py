"""``agent-rl config``: what can be set."""

from __future__ import annotations

import difflib

from rich.table import Table

from agent_rl.commands.terminal import make_console
from agent_rl.config.key_pages import reference_page, sections
from agent_rl.config.keys import Key
from agent_rl.errors import ConfigError


def config_command(prefix: str | None, markdown: bool) -> None:
    """Print the keys that begin with ``prefix``. Raises ``ConfigError`` when there is none."""
    if markdown:
        print(reference_page(), end="")
        return
    every = [key for section in sections() for key in section.keys]
    shown = [key for key in every if prefix is None or _belongs(key.name, prefix)]
    if not shown:
        names = [section.name for section in sections() if section.name]
        near = difflib.get_close_matches(prefix or "", [*names, *(k.name for k in every)], n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names)}"
        raise ConfigError([f"config: got {prefix!r}, which is no section or key; {hint}"])
    console = make_console()
    for section in sections():  # what meanings refer to
        if section.name == prefix and section.about:
            console.print(section.about.replace("``", ""), soft_wrap=True, highlight=False)
            console.print()
    console.print(_table(shown))


def _belongs(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _table(keys: list[Key]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("key", no_wrap=True)  # to be copied
    for column in ("type", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for key in keys:
        table.add_row(key.name, key.expected, key.default, key.about)
    return table
