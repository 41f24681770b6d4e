"""Write the lock files: what is installed here of everything that the project needs.

``requirements.lock`` is what ``make setup`` installs; ``requirements-eval.lock`` is what the
official SWE-bench harness adds to it, ``requirements-cluster.lock`` what Ray does.

After changing dependencies in pyproject.toml run it in a working environment of Python 3.11 and in
one of a newer Python: each writes its own pins, with a marker where the other's are not the same.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("train", "docker", "dev")
_BUILD = ("setuptools", "wheel")
_SIDES = ("python_version < '3.12'", "python_version >= '3.12'")
# Parts of torch's builds for CUDA, pinned by each build itself; a build for the CPU needs none.
_OF_TORCH_BUILDS = ("cuda-", "nvidia-")


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
            if requirement.name.startswith(_OF_TORCH_BUILDS):
                continue
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
    for file, extra in (
        ("requirements-eval.lock", "eval"),
        ("requirements-cluster.lock", "cluster"),
    ):
        _write(file, {k: v for k, v in closure("agent-rl", (extra,)).items() if k not in pins})


def _write(file: str, pins: dict[str, str]) -> None:
    """Replace the pins of this Python's side; those of the other side stay as the file has them."""
    here, other = _SIDES if sys.version_info < (3, 12) else _SIDES[::-1]
    kept = {}
    for line in Path(file).read_text().splitlines():
        pin, _, marker = line.partition("; ")
        if not line.startswith("#") and marker != here:
            name, _, version = pin.partition("==")
            kept[name] = version
    lines = []
    for name in sorted(pins.keys() | kept.keys()):
        if pins.get(name) == kept.get(name):
            lines.append(f"{name}=={pins[name]}\n")
            continue
        sides = sorted(
            (side, found[name]) for side, found in ((here, pins), (other, kept)) if name in found
        )
        lines += [f"{name}=={version}; {side}\n" for side, version in sides]
    Path(file).write_text("# Made by scripts/lock.py.\n" + "".join(lines))


if __name__ == "__main__":
    main()
