"""Compare two runs to the last digit: ``python scripts/compare_runs.py RUN OTHER``.

Every metric that is not a time or a rate of time must be equal in every step. Exits with 1 and
names the first difference of each metric otherwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def is_timing(name: str) -> bool:
    """Return True for what depends on the clock."""
    return name.startswith("time_") or name.endswith(("_per_s", "_s"))


def differences(one: Path, other: Path) -> list[str]:
    """Return a line per metric that differs; a metric that only one run has differs."""
    rows = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (one, other)
    ]
    if len(rows[0]) != len(rows[1]):
        return [f"steps: {len(rows[0])} and {len(rows[1])}"]
    found: dict[str, str] = {}
    for left, right in zip(*rows, strict=True):
        for name in sorted(left.keys() | right.keys()):
            if not is_timing(name) and left.get(name) != right.get(name):
                told = f"{name}: step {left['step']}: {left.get(name)!r} and {right.get(name)!r}"
                found.setdefault(name, told)
    return list(found.values())


if __name__ == "__main__":
    lines = differences(Path(sys.argv[1]), Path(sys.argv[2]))
    print("\n".join(lines) or "every metric that is not a time is equal to the last digit")
    sys.exit(bool(lines))
