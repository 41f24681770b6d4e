"""The routing that is compared is the one Megatron's dispatcher gets."""

from pathlib import Path

import bench_fakes
import numpy as np
import pytest

from agent_rl.bench.r3 import routing
from agent_rl.bench.router_watch import used_sets, watch_routers
from agent_rl.metrics.mismatch import flips
from agent_rl.trainer.megatron import MegatronTrainer


@pytest.fixture
def trainer(tmp_path: Path):
    made = MegatronTrainer(bench_fakes.config(), bench_fakes.policy(tmp_path))
    yield made
    made.close()


def test_replay_uses_the_recorded_sets_and_live_routing_does_not(trainer: MegatronTrainer) -> None:
    samples = bench_fakes.samples()
    num_sets = sum(2 * (len(s.token_ids) - 1) for s in samples)
    replayed = used_sets(trainer, samples, "r3")
    assert (replayed.num_sets, replayed.num_differing) == (num_sets, 0)
    live = used_sets(trainer, samples, "off")
    scores = trainer.score(samples, "off", live_routing=True)
    assert live.num_sets == num_sets
    assert live.num_differing == int(flips(*routing(samples, scores)).sum()) > 0
    assert live.flip_rate == live.num_differing / num_sets


def test_maps_have_one_row_a_token_and_stop_being_collected(trainer: MegatronTrainer) -> None:
    sample = bench_fakes.samples(1)[0]
    with watch_routers() as calls:
        trainer.score([sample], "off")
    trainer.score([sample], "off")
    assert [layer for layer, _ in calls] == [0, 1]
    for _, used in calls:
        assert used.dtype == np.bool_
        np.testing.assert_array_equal(used.sum(axis=1), 2)
