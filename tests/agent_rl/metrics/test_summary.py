"""What a run's summary and the resolve-rate interval say."""

import pytest

from agent_rl.metrics.intervals import wilson
from agent_rl.metrics.summary import Evaluation, Summary, summarize


def _evaluation(rate: float, total: int) -> Evaluation:
    return Evaluation(rate, total, 0, {"all": (round(rate * total), total)}, 3.0)


def _step(step: int, tokens: int, replayed: float, kl: float, f2: float) -> dict[str, float]:
    return {
        "step": step,
        "num_tokens": tokens / 10,  # of the fed ones, so many were sampled
        "num_fed_tokens": tokens,
        "replayed_fraction": replayed,
        "kl_k3_rollout_old": kl,
        "f_2": f2,
        "time_step_s": 2.0,
    }


def test_interval_of_a_known_proportion() -> None:
    """8 of 10: the textbook Wilson interval."""
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 20)[0] == 0.0
    assert wilson(20, 20)[1] == 1.0


def test_replayed_fraction_is_over_tokens_not_steps() -> None:
    metrics = [_step(1, 300, 1.0, 2e-5, 0.0), _step(2, 100, 0.0, 4e-5, 1e-3)]
    metrics[1]["num_tokens"] = 90.0  # a step of another mix weighs by what it fed
    summary = summarize("a", 0, metrics, _evaluation(0.4, 10), _evaluation(0.8, 10), completed=True)
    assert summary.replayed_fraction == pytest.approx(0.75)
    assert summary.kl_mean == pytest.approx(3e-5)
    assert summary.f2_max == 1e-3
    assert summary.train_wall_s == 4.0
    assert (summary.resolve_rate_before, summary.resolve_rate_after) == (0.4, 0.8)


def test_steps_without_signal_count_for_time_only() -> None:
    metrics = [_step(1, 100, 1.0, 2e-5, 0.0), {"step": 2, "time_step_s": 1.0}]
    summary = summarize("a", 0, metrics, _evaluation(0, 5), _evaluation(1, 5), completed=False)
    assert summary.replayed_fraction == 1.0
    assert summary.train_wall_s == 3.0
    assert summary.num_heldout == 5
    assert not summary.completed


def test_alarms_and_what_replay_is_worth_are_summed_up() -> None:
    metrics = [_step(i, 100, 1.0, 2e-5, f2) for i, f2 in enumerate((0.0, 0.06, 0.2))]
    for row, level in zip(metrics, (0.0, 1.0, 2.0), strict=True):
        row["alarm_f2"] = level
    metrics[1]["kl_k3_no_replay"], metrics[2]["kl_k3_no_replay"] = 1e-4, 3e-4
    summary = summarize("a", 0, metrics, _evaluation(0, 5), _evaluation(1, 5), completed=True)
    assert summary.num_alarms == 2
    assert summary.kl_no_replay_mean == pytest.approx(2e-4)
    assert summary.kl_replay_mean == 0.0  # never measured


def test_replay_is_compared_with_live_routers_on_the_same_tokens() -> None:
    """The k3 of all trained tokens is another figure: a probe sees a few samples of some steps."""
    metrics = [_step(step, 100, 1.0, 7e-5, 0.0) for step in range(4)]
    metrics[1] |= {"kl_k3_replay": 1e-5, "kl_k3_no_replay": 1e-4}
    metrics[2] |= {"kl_k3_no_replay": 9e-4}  # its samples had no rows
    metrics[3] |= {"kl_k3_replay": 3e-5, "kl_k3_no_replay": 3e-4}
    summary = summarize("a", 0, metrics, _evaluation(0, 5), _evaluation(1, 5), completed=True)
    assert summary.kl_replay_mean == pytest.approx(2e-5)
    assert summary.kl_no_replay_mean == pytest.approx(2e-4)
    assert summary.kl_mean == pytest.approx(7e-5)


def test_a_summary_is_read_back_also_one_without_the_newer_fields() -> None:
    metrics = [_step(1, 100, 1.0, 2e-5, 0.0)]
    summary = summarize("a", 0, metrics, _evaluation(0, 5), _evaluation(1, 5), completed=True)
    assert Summary.from_json(summary.to_json()) == summary
    older = summary.to_json()
    del older["kl_replay_mean"]
    assert Summary.from_json(older | {"dropped": 1}) == summary
    del older["completed"]
    with pytest.raises(TypeError):
        Summary.from_json(older)
