"""The checks of ``agent-rl doctor --gpu``, small and on whatever device there is."""

from __future__ import annotations

import pytest
import torch

from agent_rl.commands.doctor import gpu_doctor_command
from agent_rl.doctor.trainer_check import Size, _relative, check_trainer, layer_specs
from agent_rl.run.warmstart.train import TinyMoEShape
from agent_rl.trainer.router_replay import ReplayTable, RouterReplay

pytestmark = pytest.mark.megatron

TINY = TinyMoEShape(num_experts=8, moe_top_k=2)
SMALL = Size(
    exact=TINY, timed=TINY, timed_dtype="float32", num_sequences=2, length=16, num_rounds=2
)


def test_all_checks_pass_here() -> None:
    checks = check_trainer(SMALL)
    assert len(checks) == 4 * len(layer_specs())
    # How long a step of this size takes says nothing.
    assert [c.name for c in checks if c.verdict != "ok" and not c.name.endswith(": step")] == []
    assert "with replay / without" in checks[3].detail


class Deaf(RouterReplay):
    """Loses every row, so that each choice is the router's."""

    def put(self, micro_batch: int, table: ReplayTable) -> None:
        nothing = torch.zeros_like(table.present)
        super().put(micro_batch, ReplayTable(table.rows, nothing, nothing))


def test_a_replay_that_does_nothing_is_noticed() -> None:
    failed = {c.name for c in check_trainer(SMALL, make_replay=Deaf) if c.verdict == "missing"}
    assert failed == {"portable: replayed experts are used", "portable: gradients"}


def test_a_gradient_that_is_no_number_is_the_worst_of_all() -> None:
    some, none = torch.ones(3), torch.zeros(3)
    nan = torch.tensor([1.0, float("nan"), 1.0])
    found = [_relative(some, some), _relative(nan, some), _relative(some, none)]
    assert found == [0.0, float("inf"), float("inf")]
    assert _relative(none, none) == 0.0
    assert max((value, name) for value, name in zip(found, "abc", strict=True)) == (found[2], "c")


def test_without_a_gpu_the_command_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_doctor_command(has_device=False)
    assert stopped.value.code == 1
    assert "no CUDA device" in capsys.readouterr().out
