"""The console of commands. A path like ``runs/a[red]b`` is data, and is shown as it is.

Rich would read ``[red]`` as a colour, ``agent-rl[cluster]`` as a tag to leave out and ``:bug:`` as
a picture. Colours are given as ``style=`` or as ``rich.text.Text``, never inside a string.
"""

from __future__ import annotations

from rich.console import Console


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """The console of a command; strings in prints, tables and panels are taken literally."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False)
