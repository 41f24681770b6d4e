"""What a person sees of a run, on terminals of several sizes and in a pipe."""

from __future__ import annotations

import io

import pytest

from agent_rl.commands.terminal import make_console
from agent_rl.metrics.display import Eta, LineDisplay, LiveDisplay, _columns_that_fit, make_display


def metrics(step: int, *, resolved: float = 1.0) -> dict[str, float]:
    """Figures as wide as they get."""
    return {
        "step": step,
        "reward_mean": 1.0,
        "resolve_rate": resolved,
        "replayed_fraction": 1.0,
        "kl_k3_rollout_old": 3.0e-05,
        "f_2": 0.0,
        "router_flip_rate": 0.1234,
        "tokens_per_s": 12_345.0,
        "time_generate_s": 55.0,
        "time_environment_s": 35.0,
        "time_train_s": 10.0,
        "time_step_s": 100.0,
    }


def screen(width: int, height: int, num_steps: int, *, resolved: float = 1.0) -> list[str]:
    """The lines of the panel after ``num_steps`` of 1000 steps."""
    console = make_console()
    console.file, console.size = io.StringIO(), (width, height)  # type: ignore[assignment]
    display = LiveDisplay(console)
    with display:
        display.activity("evaluating (before)", 3, 384)
        for step in range(1, num_steps + 1):
            display.step_done(step, 1000, metrics(step, resolved=resolved))
        display.activity("rollout", 30, 64)
        console.file = io.StringIO()
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 10), (60, 4)])
@pytest.mark.parametrize("num_steps", [0, 5, 30])
def test_bars_and_the_newest_step_are_on_the_screen_and_nothing_is_cut(
    width: int, height: int, num_steps: int
) -> None:
    lines = screen(width, height, num_steps)
    assert len(lines) < max(height, 6)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert lines[0].startswith("run ")
    assert lines[1].startswith("rollout ")
    assert "30/64" in lines[1]
    if num_steps:
        assert f"{num_steps}/1000" in lines[0]
        assert "ETA " in lines[0]
        assert lines[-1].split()[0] == str(num_steps)
        assert "3.0e-05  0.0e+00          12.34%" in lines[-1]
        assert "KL     F(2)  router disagr." in lines[2]


@pytest.mark.parametrize(
    ("width", "resolved", "shown", "left_out"),
    [
        (80, 1.0, {"tokens/s", "s/step"}, {"resolved", "time split"}),  # resolved says reward again
        (80, 0.5, {"resolved", "s/step"}, {"tokens/s", "time split"}),
        (120, 1.0, {"resolved", "tokens/s", "s/step", "time split"}, set[str]()),
    ],
)
def test_a_narrow_terminal_goes_without_the_least_useful(
    width: int, resolved: float, shown: set[str], left_out: set[str]
) -> None:
    heading = screen(width, 24, 3, resolved=resolved)[2]
    assert all(name in heading for name in shown)
    assert not any(name in heading for name in left_out)


def test_the_remaining_time_is_that_of_the_steps() -> None:
    """However long loading and the evaluation before the first step took."""
    eta = Eta()
    assert eta.update(1, 101, 4.0) == 400.0
    assert eta.update(2, 101, 2.0) == 297.0
    for step in range(3, 23):
        eta.update(step, 101, 1.0)
    assert eta.update(23, 101, 1.0) == 78.0  # the last steps count


def test_a_pipe_gets_a_line_a_step() -> None:
    console = make_console(width=80)
    console.file = io.StringIO()
    with make_display(console) as display:
        assert isinstance(display, LineDisplay)
        display.activity("rollout", 1, 2)
        display.step_done(3, 10, metrics(3))
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("step 3/10  reward 1.000")
    assert line.endswith("100.0s: gen 55% env 35% train 10%  ETA 11:40")


@pytest.mark.parametrize(("behind", "shown"), [(0.0, False), (1.0, True)])
def test_a_rollout_of_older_weights_is_marked(behind: float, shown: bool) -> None:
    stale = metrics(3) | {"staleness_max": behind}
    console = make_console(width=80)
    console.file = io.StringIO()
    with make_display(console) as display:
        display.step_done(3, 10, stale)
    assert ("behind 1" in console.file.getvalue()) is shown
    columns = _columns_that_fit([(3, stale)], 200)
    assert columns.get("behind") == (["1"] if shown else None)
