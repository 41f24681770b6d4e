"""List all keys: as Markdown for ``docs/configuration.md``, and as lines that a test freezes."""

from __future__ import annotations

from collections.abc import Sequence

from agent_rl.config.keys import Key, Section, sections_of
from agent_rl.config.schema import RunConfig

_HEAD = """\
# Configuration

A run is described by a YAML file of these keys, for example
[configs/repair_tiny.yaml](../configs/repair_tiny.yaml). Keys that a file leaves out have their
defaults. Any key can be set on the command line: `agent-rl train FILE train.steps=50 seed=1`.
Unknown keys, wrong types, values out of range and keys that contradict each other are refused
before anything starts, with the nearest valid name. Sizes have an upper bound where a slip of the
finger would fill the machine. A key is read always, unless its meaning says for what it is read.

`agent-rl config` prints this list, `agent-rl config routing` one section. A run's folder holds its
whole configuration as `config.yaml`. This page is made from
[agent_rl/config/schema.py](../agent_rl/config/schema.py) by
`agent-rl config --markdown > docs/configuration.md`.
"""


def sections() -> tuple[Section, ...]:
    """Return every key of a configuration, in the order of its declaration."""
    return sections_of(RunConfig)


def config_surface() -> list[str]:
    """Return every key with its type, range and default, one line each."""
    return [f"{k.name}: {k.expected} = {k.default}" for s in sections() for k in s.keys]


def reference_page() -> str:
    """Return all keys as Markdown."""
    parts = [_HEAD]
    for section in sections():
        if section.name:
            parts.append(f"## {section.name}\n\n{section.about}\n")
        parts.append(_table(section.keys))
    return "\n".join(parts)


def _table(keys: Sequence[Key]) -> str:
    lines = ["| key | type | range | default | meaning |", "|---|---|---|---|---|"]
    for key in keys:
        cells = (f"`{key.name}`", key.kind, key.limits, f"`{key.default}`", key.about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
