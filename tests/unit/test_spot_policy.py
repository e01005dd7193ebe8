"""Workers that are cheap and may be taken away: how many, and how often a checkpoint."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from simulated_training import SimulatedTraining
from unisono.adapt.layout_policies import SpotPolicy, daly_s, mean_time_between_failures
from unisono.adapt.layouts import Layout
from unisono.adapt.view import Policy, Timings, View
from unisono.errors import JobError, PolicyError
from unisono.train.state.policy_state import observed

pytestmark = pytest.mark.unit


class Market:
    """Answers what it is told to."""

    def __init__(self, **says: Any) -> None:
        self.says: dict[str, Any] = says

    def __call__(self) -> Mapping[str, Any]:
        if isinstance(self.says.get("price"), Exception):
            raise self.says["price"]
        return self.says


def training(market: Market, workers: int = 4, **more: Any) -> SimulatedTraining:
    policy = SpotPolicy(market, every=1, **more)
    return SimulatedTraining(policy, lambda layout: 1.0, Layout(workers, 64, 8), checkpoint_s=2.0)


# -- how often


def test_the_formulas_are_youngs_and_dalys() -> None:
    assert daly_s(1e-6, 3600.0) == pytest.approx(math.sqrt(2 * 1e-6 * 3600), rel=1e-3)  # Young's
    assert daly_s(100.0, 50.0) == daly_s(200.0, 50.0) == 50.0
    assert mean_time_between_failures(0.0, 0, 3600.0) == 3600.0
    assert mean_time_between_failures(7200.0, 2, 3600.0) == 3600.0


def test_dalys_interval_loses_least_by_his_own_model_of_the_time_lost() -> None:
    checkpoint_s, between_s = 20.0, 1500.0

    def total_s(every_s: float) -> float:  # Daly 2006, equation 20, for a second of work without restarts
        return between_s * (math.exp((every_s + checkpoint_s) / between_s) - 1) / every_s

    found = daly_s(checkpoint_s, between_s)
    assert total_s(found) < min(total_s(found * factor) for factor in (0.8, 1.25, 0.5, 2))


def lost_time_s(policy: Policy, seed: int) -> tuple[float, list[float]]:
    """Seconds for 10 000 seconds of work beyond these, and those from one checkpoint to the next."""
    work_s, checkpoint_s, between_s, chance = 10_000.0, 5.0, 250.0, random.Random(seed)
    done = kept = now = 0.0
    departures, at, next_loss = 0, [], chance.expovariate(1 / between_s)
    view = View(1, 0, 0, 64, 64, 8, 8, 2, 0.1, workers=(Timings(step_s=1.0, checkpoint_s=checkpoint_s),) * 2)
    while done < work_s:
        done, now = done + 1, now + 1
        if now >= next_loss:  # all are lost at once, and what was done since the checkpoint with them
            done, departures, next_loss = kept, departures + 1, now + chance.expovariate(1 / between_s)
            continue
        policy.after_step(replace(view, seconds=now, departures=departures))
        if policy.decided():
            now, kept = now + checkpoint_s, done
            at.append(now)
    return now - work_s, [later - earlier for earlier, later in pairwise(at)]


class Every(Policy):
    """A checkpoint every so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.kept_s = seconds, 0.0

    def after_step(self, view: View) -> None:
        if view.seconds - self.kept_s >= self.seconds:
            self.kept_s = view.seconds
            self.checkpoint()


def test_the_cadence_is_dalys_for_the_failures_that_come_and_beats_rarer_and_more_frequent_ones() -> None:
    best_s, seeds = daly_s(5.0, 250.0) + 5.0, range(4)
    ours = [lost_time_s(SpotPolicy(Market(), prior_s=500.0), seed) for seed in seeds]
    newest = [sum(gaps[-100:]) / 100 for _, gaps in ours]
    assert sum(newest) / len(newest) == pytest.approx(best_s, rel=0.1)
    lost = sum(seconds for seconds, _ in ours)
    assert lost < 0.8 * sum(lost_time_s(Every(best_s / 4), seed)[0] for seed in seeds)
    assert lost < 0.8 * sum(lost_time_s(Every(best_s * 4), seed)[0] for seed in seeds)


def test_before_anything_failed_the_cadence_is_that_of_the_prior() -> None:
    found = training(Market(), prior_s=10_000.0).run(1000)
    steps = [step for step, one in found.decided if one.verb == "checkpoint"]
    assert steps[0] == pytest.approx(daly_s(2.0, 10_000.0) + 2.0, rel=0.05)


# -- how many


def test_the_number_of_workers_is_what_the_budget_pays_for() -> None:
    market = Market(price=0.30)
    found = training(market, budget=1.3).run(20)
    assert found.said("resize") == []  # 4 cost 1.20
    for price, workers in ((0.50, 2), (0.14, 8), (5.0, 1), (0.0, 8)):
        market.says["price"] = price
        assert found.run(20).layout.workers == workers
    assert found.said("resize") == [2, 8, 1, 8]


def test_a_number_that_brings_nothing_is_not_paid_for() -> None:
    assert training(Market(price=0.1), budget=0.75).run(20).said("resize") == []  # 7 would wait for each other as 4 do


def test_a_price_that_trembles_does_not_move_the_workers_with_it() -> None:
    market = Market(price=0.25)
    found, chance = training(market, workers=2, budget=1.0), random.Random(0)
    for _ in range(300):
        market.says["price"] = 0.25 * chance.uniform(0.95, 1.05)
        found.one_step()
    assert len(found.said("resize")) <= 1


def test_a_notice_is_answered_at_once_by_a_checkpoint_and_a_worker_in_place_of_the_one_that_goes() -> None:
    market = Market(price=0.1, notices=0)
    found = training(market, budget=0.4).run(10)
    market.says["notices"] = 1
    assert [(one.verb, one.value) for one in found.one_step()] == [("resize", 5), ("checkpoint", None)]
    assert found.run(30).said("resize") == [5]  # it is the same notice
    found.departures += 1  # it has gone
    assert [(one.verb, one.value) for one in found.one_step()] == [("resize", 4)]
    market.says["notices"] = 3
    assert [(one.verb, one.value) for one in found.one_step()] == [("resize", 6), ("checkpoint", None)]
    market.says["notices"] = 0  # they stay after all
    assert [one.value for one in found.one_step()] == [4]


def test_what_is_affordable_stays_asked_for_whatever_notices_come_while_it_is_on_its_way() -> None:
    market = Market(price=0.1, notices=0)
    found = training(market, workers=1, budget=0.45)
    assert [one.value for one in found.one_step()] == [4]
    found.change(workers=1)  # nobody has come yet, and the only one is about to go
    found.coming = None
    market.says["notices"] = 1
    assert [one.value for one in found.one_step() if one.verb == "resize"] == [5]
    found.departures += 1
    market.says["notices"] = 2  # another one, which has left by the time that it is heard of
    found.departures += 1
    assert [one.value for one in found.one_step() if one.verb == "resize"] == [4]
    market.says["price"] = 0.04
    assert [one.value for one in found.one_step() if one.verb == "resize"] == [8]  # notices are no reason to wait
    assert min(found.said("resize")) == 4


def test_no_more_are_asked_for_than_there_may_be() -> None:
    market = Market(price=0.1, notices=3)
    assert max(training(market, budget=9.0, workers=8).run(20).said("resize"), default=8) == 8
    assert training(market, budget=0.4, most=4).run(20).said("resize") == []


def test_without_a_budget_the_number_of_workers_is_others_business() -> None:
    market = Market(notices=0)
    found = training(market).run(10)
    market.says["notices"] = 2
    assert [one.verb for one in found.one_step()] == ["checkpoint"]
    assert found.run(10).said("resize") == []


def test_a_market_that_is_out_of_reach_changes_nothing_and_one_that_talks_nonsense_ends_the_job() -> None:
    market = Market(price=TimeoutError("no answer"))
    found = training(market, budget=0.1).run(10)
    assert found.decided == []
    assert found.observed["spot"] == {"problem": "TimeoutError: no answer"}
    for wrong in ({"price": -1.0}, {"price": "dear"}, {"cost": 1.0}, {"notices": math.nan}):
        with pytest.raises(PolicyError, match="the policy spot failed in observe: ValueError: market"):
            observed(SpotPolicy(lambda wrong=wrong: wrong), found.view())  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": 0},
        {"every": 0},
        {"margin": -1},
        {"fewest": 0},
        {"fewest": 3, "most": 2},
        {"prior_s": 0},
        {"checkpoint_s": 0},
    ],
)
def test_words_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        SpotPolicy(Market(), **wrong)
