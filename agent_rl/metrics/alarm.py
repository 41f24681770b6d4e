"""The early sign of a collapse: the share of tokens whose probabilities differ by more than 2.

arXiv 2510.11370, 5.3: runs that collapsed had a high F(2), one of them above 0.1 at the step where
it did, while with replay F(2) stayed mostly below 1e-4. The warning at half of 0.1 is this
project's. An alarm says so; it ends a run only under ``train.stop_on_alarm``.
"""

from __future__ import annotations

from collections.abc import Mapping

WARN_AT, ALARM_AT = 0.05, 0.1


def f2_alarm(f2: float) -> int:
    """0 all is well, 1 F(2) climbs towards what ends in collapse, 2 it is there."""
    return 2 if f2 >= ALARM_AT else 1 if f2 >= WARN_AT else 0


def ends_run(metrics: Mapping[str, float], stop_on_alarm: bool) -> bool:
    """Tell whether a run that asked for it ends after a step with these metrics."""
    return stop_on_alarm and metrics.get("alarm_f2", 0.0) >= 2


def alarm_text(step: int, metrics: Mapping[str, float]) -> str:
    """Return the warning for a person after ``step``; empty when all is well."""
    level = metrics.get("alarm_f2", 0.0)
    if level < 1:
        return ""
    f2, replayed = metrics.get("f_2", 0.0), metrics.get("replayed_fraction", 0.0)
    where = f"step {step}: F(2) = {f2:.3f} with {replayed:.0%} of the tokens replayed"
    if level < 2:
        return f"warning: {where}; runs collapsed above {ALARM_AT:g}"
    return (
        f"ALARM: {where}, above {ALARM_AT:g}, where runs collapse: rollout and trainer are two "
        "policies. Check routing.replay=r3, engine.dtype, sampling.temperature and the learning "
        "rate, or go back to an earlier checkpoint"
    )
