"""Write the lock files: what is installed here of everything that the project needs.

``requirements.lock`` is what ``make setup`` installs; ``requirements-eval.lock`` is what the
official SWE-bench harness adds to it, ``requirements-cluster.lock`` what Ray does.

Run it in a working ``.venv`` after changing dependencies in pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata as metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("train", "docker", "dev")
_BUILD = ("setuptools", "wheel")


def closure(root: str, extras: tuple[str, ...]) -> dict[str, str]:
    """Name -> version of every installed distribution that ``root`` needs, itself left out."""
    pins: dict[str, str] = {}
    todo = [(canonicalize_name(root), frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        distribution = metadata.distribution(name)
        if name != canonicalize_name(root):
            pins[name] = distribution.version.partition("+")[0]
        for text in distribution.requires or []:
            requirement = Requirement(text)
            environments = [{**default_environment(), "extra": e} for e in (*wanted, "")]
            if requirement.marker is None or any(
                requirement.marker.evaluate(environment) for environment in environments
            ):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return pins


def main() -> None:
    pins = closure("agent-rl", EXTRAS)
    pins |= {name: metadata.version(name) for name in _BUILD}
    _write("requirements.lock", pins)
    harness = closure("agent-rl", ("eval",))
    _write("requirements-eval.lock", {k: v for k, v in harness.items() if k not in pins})
    cluster = closure("agent-rl", ("cluster",))
    _write("requirements-cluster.lock", {k: v for k, v in cluster.items() if k not in pins})


def _write(file: str, pins: dict[str, str]) -> None:
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    Path(file).write_text("# Made by scripts/lock.py.\n" + "".join(lines))


if __name__ == "__main__":
    main()
