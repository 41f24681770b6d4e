"""The order of tasks: complete epochs, the same for the same seed, computed from the step alone."""

from agent_rl.tasks.curriculum import Curriculum


def test_every_task_once_an_epoch() -> None:
    curriculum = Curriculum(range(12), per_step=4, seed=0)
    first = [task for step in (1, 2, 3) for task in curriculum.at(step)]
    second = [task for step in (4, 5, 6) for task in curriculum.at(step)]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_a_step_across_two_epochs() -> None:
    curriculum = Curriculum(range(5), per_step=3, seed=1)
    asked = [task for step in range(1, 6) for task in curriculum.at(step)]
    assert sorted(asked[:5]) == sorted(asked[5:10]) == sorted(asked[10:]) == list(range(5))


def test_a_resumed_run_asks_the_same() -> None:
    whole = Curriculum(range(100), per_step=8, seed=3)
    before = [whole.at(step) for step in range(1, 20)]
    assert Curriculum(range(100), per_step=8, seed=3).at(17) == before[16]


def test_seeds_differ() -> None:
    assert Curriculum(range(50), 10, 0).at(1) != Curriculum(range(50), 10, 1).at(1)
