"""A policy that follows the number of workers, or the noise, with the strategy."""

from dataclasses import replace
from typing import Any

import pytest

from unisono.adapt.batch_policies import NoiseScalePolicy
from unisono.adapt.communication_policies import MEASURED, StrategyPolicy
from unisono.adapt.norms import Noise
from unisono.adapt.view import View
from unisono.errors import JobError
from unisono.sync import LocalSGD

pytestmark = pytest.mark.unit

VIEW = View(
    step=0,
    epoch=0,
    samples=0,
    batch_size=64,
    base_batch_size=64,
    shards=8,
    base_shards=8,
    world_size=2,
    learning_rate=0.1,
)
BY_WORKERS: dict[int, object] = {1: "all-reduce", 4: "local-sgd:every=16", 8: "pair-averaging"}
BY_NOISE: dict[float, object] = {0: "all-reduce", 4: "local-sgd:every=16", 16: "pair-averaging"}


class Run:
    """A run in which the policy's decisions are followed."""

    def __init__(self, policy: StrategyPolicy, **view: Any) -> None:
        self.policy, self.view = policy, replace(VIEW, **view)
        policy.before_train(self.view)
        self.decided: list[tuple[int, Any]] = []
        self._follow()

    def steps(self, number: int, **view: Any) -> "Run":
        for _ in range(number):
            self.view = replace(self.view, step=self.view.step + 1, **view)
            if self.view.strategy != "all-reduce":
                self.view = replace(self.view, noise=None)  # nothing is known of it
            self.policy.after_step(self.view)
            self._follow()
        return self

    def _follow(self) -> None:
        for one in self.policy.decided():
            assert one.verb == "set_strategy"
            self.decided.append((self.view.step, one.value))
            self.view = replace(self.view, strategy=str(one.value))


def test_a_run_begins_with_the_strategy_for_its_number_of_workers() -> None:
    assert Run(StrategyPolicy(BY_WORKERS), world_size=3).decided == []
    assert Run(StrategyPolicy(BY_WORKERS), world_size=4).decided == [(0, "local-sgd:every=16")]
    assert Run(StrategyPolicy(BY_WORKERS), world_size=100).decided == [(0, "pair-averaging")]


def test_it_changes_with_the_number_of_workers_and_back_each_once() -> None:
    run = Run(StrategyPolicy(BY_WORKERS))
    run.steps(3, world_size=2).steps(3, world_size=7).steps(3, world_size=8).steps(3, world_size=1)
    assert run.decided == [(4, "local-sgd:every=16"), (7, "pair-averaging"), (10, "all-reduce")]


def test_strategies_may_be_given_as_values() -> None:
    assert Run(StrategyPolicy({1: LocalSGD(every=3)})).decided == [(0, "local-sgd:every=3")]


@pytest.mark.parametrize(
    ("scale", "strategy"), [(64 * 3.9, None), (64 * 4.0, "local-sgd:every=16"), (64 * 99, "pair-averaging")]
)
def test_it_follows_the_noise_by_the_batch_once_that_is_measured(scale: float, strategy: str | None) -> None:
    run = Run(StrategyPolicy(noise=BY_NOISE, look_every=1000))
    run.steps(MEASURED - 1, noise=Noise(scale, 1.0))
    assert run.decided == []
    run.steps(10, noise=Noise(scale, 1.0))
    assert run.decided == ([(MEASURED, strategy)] if strategy else [])


def test_it_looks_at_the_noise_again_after_a_while_with_steps_of_all_reduce() -> None:
    run = Run(StrategyPolicy(noise=BY_NOISE, look_every=100))
    run.steps(MEASURED + 100 + MEASURED, noise=Noise(64 * 5, 1.0))
    assert run.decided == [
        (MEASURED, "local-sgd:every=16"),
        (MEASURED + 100, "all-reduce"),
        (MEASURED + 100 + MEASURED, "local-sgd:every=16"),
    ]
    run.steps(100, noise=Noise(64 * 20, 1.0)).steps(MEASURED, noise=Noise(64 * 20, 1.0))
    assert [strategy for _, strategy in run.decided[3:]] == ["all-reduce", "pair-averaging"]


def test_without_a_noise_scale_nothing_changes() -> None:
    assert Run(StrategyPolicy(noise=BY_NOISE)).steps(200, noise=None).decided == []


def test_only_the_noise_has_to_be_measured() -> None:
    assert StrategyPolicy(noise=BY_NOISE).needs_monitor
    assert not StrategyPolicy(BY_WORKERS).needs_monitor
    assert NoiseScalePolicy(largest=256).needs_monitor


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "one of them"),
        ({"workers": BY_WORKERS, "noise": BY_NOISE}, "one of them"),
        ({"workers": {}}, "needs a strategy from 1 on"),
        ({"workers": {2: "local-sgd"}}, "needs a strategy from 1 on, such as {1: 'all-reduce'}"),
        ({"noise": {1: "local-sgd"}}, "needs a strategy from 0 on, such as {0: 'all-reduce'}"),
        ({"noise": BY_NOISE, "look_every": 0}, "at least 1 step"),
    ],
)
def test_what_leaves_a_number_without_a_strategy_is_refused(given: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        StrategyPolicy(**given)
