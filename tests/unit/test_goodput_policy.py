"""The batch and the workers that maximise throughput times statistical efficiency."""

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from simulated_training import SimulatedTraining
from unisono.adapt.layout_policies import GoodputPolicy
from unisono.adapt.layouts import AGAIN_STEPS, Bounds, Layout, StepTime, goodput
from unisono.adapt.norms import Noise
from unisono.errors import JobError

pytestmark = pytest.mark.unit

SIZES, BATCHES = [1, 2, 3, 4, 8], [64, 88, 128, 184, 256, 360, 512, 728, 1024]
BOUNDS = Bounds(base=64, largest=1024, fewest=1, most=8)
FREE = StepTime(a_c=1.0, b_c=0.0, a_r=0.0, b_r=0.0, gamma=1.0)  # neither samples nor workers cost anything
DEAR = StepTime(a_c=0.0, b_c=0.01, a_r=9.0, b_r=9.0, gamma=1.0)  # time goes by samples, and others only hinder


def training(truth: StepTime, noise_scale: float, workers: int = 1, **more: Any) -> SimulatedTraining:
    policy = GoodputPolicy(**{"largest": 1024, **more.pop("policy", {})})
    return SimulatedTraining(policy, truth.seconds, Layout(workers, 64, 8), noise_scale=noise_scale, **more)


def share_of_best(found: SimulatedTraining, truth: StepTime) -> float:
    noise = Noise(found.noise_scale, 1.0)
    grid = [Layout(workers, batch, 8) for workers in SIZES for batch in BATCHES]
    best = max(goodput(one, truth.seconds(one), noise, 64) for one in grid)
    return goodput(found.layout, truth.seconds(found.layout), noise, 64) / best


def test_goodput_is_throughput_times_pollux_efficiency() -> None:
    assert goodput(Layout(2, 256, 8), 0.5, Noise(640.0, 2.0), 64) == pytest.approx(512 * (320 + 64) / (320 + 256))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 10))])
def test_it_ends_within_5_percent_of_the_best_of_all_batches_and_workers(seed: int) -> None:
    chance = random.Random(seed)
    shard_s, share = 10 ** chance.uniform(-3, 0), chance.random()
    truth = StepTime(
        a_c=shard_s * share,
        b_c=shard_s * (1 - share) / 8,
        a_r=shard_s * 10 ** chance.uniform(-2, 0.7),
        b_r=shard_s * 10 ** chance.uniform(-1.5, 0.7),
        gamma=chance.uniform(1, 10),
    )
    found = training(truth, 10 ** chance.uniform(1.5, 4.5), chance.choice([1, 2, 4]), jitter=0.05, seed=seed)
    found.run(700)
    assert share_of_best(found, truth) >= 0.95
    before = len(found.said("resize")) + len(found.said("set_batch_size"))
    found.run(300)
    assert len(found.said("resize")) + len(found.said("set_batch_size")) <= before + 3


def test_it_goes_one_step_beyond_what_was_seen_and_never_both_ways_at_once() -> None:
    found = training(FREE, noise_scale=1e6).run(600)
    assert found.layout == Layout(8, 1024, 8)
    assert found.said("resize") == [2, 3, 4, 8]
    assert found.said("set_batch_size") == BATCHES[1:]
    steps = [step for step, one in found.decided if one.verb in ("resize", "set_batch_size")]
    assert all(later - earlier >= 20 for earlier, later in pairwise(steps))


def test_the_rate_follows_the_batch_by_the_gain_over_a_ramp() -> None:
    found = training(FREE, noise_scale=1000.0, policy={"largest": 256}).run(400)
    assert found.layout.batch_size == 256
    assert found.rate == pytest.approx(0.1 * Noise(1000.0, 1.0).gain(64, 256), rel=1e-6)
    rates = [0.1, *found.said("set_learning_rate")]
    assert max(later / earlier for earlier, later in pairwise(rates)) < 1.02
    for rule, power in (("linear", 1.0), ("sqrt", 0.5), ("none", 0.0)):
        other = training(FREE, noise_scale=1000.0, policy={"rule": rule, "largest": 256}).run(400)
        assert other.rate == pytest.approx(0.1 * 4**power, rel=1e-6)


def test_it_stays_with_the_small_batch_and_one_worker_where_nothing_else_pays() -> None:
    found = training(DEAR, noise_scale=50.0, jitter=0.05).run(1500)
    assert found.layout == Layout(1, 64, 8)
    assert len(found.said("resize")) <= 2  # there and back


def test_the_batch_grows_when_the_noise_does() -> None:
    truth = StepTime(a_c=0.002, b_c=0.001, a_r=0.002, b_r=0.0005, gamma=2.0)
    found = training(truth, noise_scale=30.0, jitter=0.05).run(800)
    early = found.layout.batch_size
    found.noise_scale = 20000.0
    found.run(1500)
    assert found.layout.batch_size >= 4 * early
    assert share_of_best(found, truth) >= 0.95


def test_a_machine_that_has_become_another_is_measured_again() -> None:
    found = training(FREE, noise_scale=1000.0, policy={"again_s": 1.0, "largest": 88}).run(300)
    assert found.layout.workers == 8
    found.step_s = DEAR.seconds  # from now on others only hinder
    found.run(5 * AGAIN_STEPS)
    assert found.layout.workers == 1


def test_nothing_is_decided_before_the_noise_is_known() -> None:
    assert training(FREE, noise_scale=-1.0).run(300).decided == []


def test_workers_that_cannot_be_had_are_not_asked_for_again_and_again() -> None:
    found = training(FREE, noise_scale=1000.0, room=2).run(2000)
    assert found.layout == Layout(2, 1024, 8)
    assert found.said("resize").count(3) == 1


class FitsAnew(GoodputPolicy):
    """A fit that still holds is kept by the main worker alone."""

    def _model(self) -> StepTime:
        self._fitted = {}, None
        return super()._model()


def test_one_that_is_stored_and_restored_at_each_step_decides_the_same() -> None:
    truth = StepTime(a_c=0.002, b_c=0.001, a_r=0.002, b_r=0.0005, gamma=2.0)
    one, other = (training(truth, noise_scale=1000.0, jitter=0.05) for _ in range(2))
    one.policy = FitsAnew(largest=1024)
    for _ in range(200):
        one.one_step()
        other.one_step()
        state = json.loads(json.dumps(other.policy.state_dict()))
        other.policy = FitsAnew(largest=1024)
        other.policy.load_state_dict(state)
    assert one.decided == other.decided
    assert one.said("resize")


def test_the_way_to_a_goal_keeps_next_to_what_was_seen() -> None:
    seen = {Layout(1, 64, 8), Layout(2, 128, 8)}
    assert {one.workers for one in BOUNDS.layouts(Layout(2, 128, 8), seen)} == {1, 2, 3, 4}
    assert BOUNDS.step_towards(Layout(2, 88, 8), seen) == Layout(2, 88, 8)
    assert BOUNDS.step_towards(Layout(1, 1024, 8), seen) == Layout(1, 184, 8)
    assert BOUNDS.step_towards(Layout(4, 1024, 8), seen) == Layout(3, 128, 8)
    assert BOUNDS.step_towards(Layout(1, 64, 8), {Layout(4, 256, 8)}) == Layout(3, 256, 8)


@pytest.mark.parametrize(
    "wrong", [{"largest": 0}, {"ramp": 0}, {"fewest": 4, "most": 2}, {"margin": 1.0}, {"again_s": 0}, {"rule": "cubic"}]
)
def test_words_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        GoodputPolicy(**{"largest": 64, **wrong})
