"""Fail unless a run's ``summary.json`` proves a real, fully replayed training run."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson

_KEYS = (
    "resolve_rate_before",
    "resolve_rate_after",
    "num_heldout",
    "train_wall_s",
    "replayed_fraction",
    "kl_mean",
    "f2_max",
    "seed",
)


def main(file: str) -> int:
    summary = orjson.loads(Path(file).read_bytes())
    problems = [f"{key} is missing" for key in _KEYS if key not in summary]
    if not problems:
        if not summary["completed"]:
            problems.append("the run did not complete")
        if summary["replayed_fraction"] != 1.0:
            problems.append(f"replayed_fraction: got {summary['replayed_fraction']}, expected 1.0")
        if not 0 < summary["kl_mean"] < 0.05:
            problems.append(f"kl_mean: got {summary['kl_mean']}, expected above 0 and below 0.05")
        if summary["f2_max"] > 0.1:
            problems.append(f"f2_max: got {summary['f2_max']}, expected at most 0.1")
        if summary["resolve_rate_before"] > 0.5:
            problems.append("the starting policy is already good: nothing to learn")
    print("\n".join(problems) or f"{file}: complete, every trained token replayed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
