"""Whatever a policy has learned is in its state: one that goes on from there decides what it would have decided."""

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from unisono.adapt.batch_policies import AdaScale, BatchSizeSchedule, EdgeOfStability, LinearScaling, NoiseScalePolicy
from unisono.adapt.communication_policies import StragglerPolicy, StrategyPolicy, TopologyPolicy
from unisono.adapt.layout_policies import GoodputPolicy, ScalingPolicy, SpotPolicy
from unisono.adapt.norms import GradientNorms, Noise
from unisono.adapt.policy_names import NAMED
from unisono.adapt.view import Policy, Timings, View
from unisono.checkpoint.codec import flatten, unflatten
from unisono.checkpoint.snapshot import Snapshot
from unisono.train.state.policy_state import PolicyState, observed
from unisono.train.state.registry import Registry, kept_value
from unisono.train.state.trained import Monitors

pytestmark = pytest.mark.unit

STEPS = 60
FEWER = {"goodput": 30}
"""Steps of those for whom each one takes long."""
CACHES = ("_fitted",)
"""What can be worked out again from the rest."""

MAKERS: dict[str, Any] = {
    "noise": lambda: NoiseScalePolicy(largest=256, every=5, ramp=4),
    "ada-scale": lambda: AdaScale(until=1e9),
    "linear": lambda: LinearScaling(4.0, 64 * STEPS),
    "schedule": lambda: BatchSizeSchedule({1: 2.0, 3: 0.5}),
    "straggler": lambda: StragglerPolicy(patience=3),
    "topology": lambda: TopologyPolicy(patience=3),
    "strategy": lambda: StrategyPolicy(workers={1: "all-reduce", 3: "local-sgd:every=4"}),
    "strategy-noise": lambda: StrategyPolicy(noise={0: "all-reduce", 2: "local-sgd:every=4"}, look_every=7),
    "edge": lambda: EdgeOfStability(every=5),
    "goodput": lambda: GoodputPolicy(largest=256, ramp=3, patience=3, again_s=20.0),
    "scaling": lambda: ScalingPolicy(patience=3, again_s=20.0),
    "spot": lambda: SpotPolicy(market, budget=3.0, prior_s=30.0),
}
MARKET = {"price": 1.0, "notices": 0}


def market() -> dict[str, float]:
    return MARKET


def state(policy: Policy) -> PolicyState:
    return PolicyState([policy], batch_size=64, shards=8)


def views(steps: int = STEPS) -> Iterator[View]:
    """A run with changing workers, one of them slow at times, waits that become long, and noise."""
    draw = random.Random(0)
    seconds = 0.0
    for step in range(1, steps + 1):
        generation = step // 15
        workers = 2 + 2 * (generation % 2)
        slow = 4.0 if step % 15 > 5 else 1.0
        times = [
            Timings(shard_s=(slow if rank == 1 else 1.0) * draw.uniform(0.09, 0.1), step_s=1.0, exposed_s=0.1 * slow)
            for rank in range(workers)
        ]
        seconds += 1.0
        yield View(
            step=step,
            epoch=step // 15,
            samples=64 * step,
            batch_size=64,
            base_batch_size=64,
            shards=8,
            base_shards=8,
            world_size=workers,
            learning_rate=0.1,
            metrics={"critical_sharpness": draw.uniform(1, 40), "loss": 1.0},
            noise=Noise(variance=draw.uniform(50, 400), signal=1.0),
            norms=GradientNorms([draw.uniform(1, 3) for _ in range(8)], [8] * 8, 1.0),
            workers=tuple(times),
            steady=step % 15 + 1,
            seconds=seconds,
            generation=generation,
            departures=generation,
            topology="ring",
        )


def go_on(at_work: PolicyState, view: View) -> list[Any]:
    """One boundary, as the policy runner has it: observe, ask, take."""
    MARKET.update(price=1.0 if view.step % 20 < 10 else 0.4, notices=int(20 < view.step < 30))
    for policy in at_work.observers(view.step):
        at_work.observed[policy.name] = observed(policy, view)
    changed: dict[str, Any] = {"batch_size": at_work.batch_size, "learning_rate": 0.1 * at_work.rate}
    view = replace(view, **changed, observed=dict(at_work.observed))
    decisions = at_work.ask("after_step", view)
    if view.step % 15 == 0:
        decisions += at_work.ask("after_epoch", view)
    at_work.take(decisions, view, 0)
    return [str(one) for one in decisions]


def registry_of(policies: PolicyState) -> Registry:
    found = Registry()
    policies.register(found)
    return found


def learned(policy: Policy) -> dict[str, Any]:
    return {name: value for name, value in vars(policy).items() if name not in CACHES and not callable(value)}


@pytest.mark.parametrize("name", MAKERS)
def test_a_policy_that_goes_on_from_its_state_knows_and_decides_all_that_it_would_have(name: str) -> None:
    at_work = state(MAKERS[name]())
    kept: list[tuple[int, Snapshot]] = []
    decided: list[list[str]] = []
    for number, view in enumerate(views(FEWER.get(name, STEPS))):
        decided.append(go_on(at_work, view))
        found = registry_of(at_work).capture(number)
        kept.append((number + 1, found))  # no later step may reach it
        again = state(MAKERS[name]())
        registry_of(again).restore(replace(found, state=unflatten(*flatten(found.state))), "early")
        assert learned(again.policies[0]) == learned(at_work.policies[0]), f"after step {number + 1}"
        assert registry_of(again).capture(number) == found
    assert any(decided)
    for begins, snapshot in kept[4::22]:
        again = state(MAKERS[name]())
        registry_of(again).restore(snapshot, "early")
        assert [go_on(again, view) for view in list(views(len(decided)))[begins:]] == decided[begins:]


def test_every_policy_is_among_them() -> None:
    kinds = {type(make()) for make in MAKERS.values()}
    assert {type(make(64)) for make in NAMED.values()} <= kinds
    assert {each for each in Policy.__subclasses__() if each.__module__.startswith("unisono.")} <= kinds


def test_monitors_go_on_from_their_state_with_all_that_they_measured() -> None:
    monitors = Monitors()
    for view in views():
        assert view.norms is not None
        monitors.time(replace(monitors.setting, generation=view.generation), view.workers)
        monitors.see(view.step, view.norms, [1.0] * 8)
        monitors.critical_step = 1.0 / view.step
    again = Monitors()
    vars(again).update(vars(kept_value(Monitors, unflatten(*flatten(asdict(monitors))), "monitors")))
    for name, value in vars(again).items():
        assert vars(Monitors())[name] != value or name == "links"
        assert value == vars(monitors)[name]
