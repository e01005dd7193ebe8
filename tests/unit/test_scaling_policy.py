"""As many workers as pay for themselves."""

from collections.abc import Callable
from typing import Any

import pytest

from simulated_training import SimulatedTraining
from unisono.adapt.layout_policies import ScalingPolicy
from unisono.adapt.layouts import Layout, useful_sizes
from unisono.errors import JobError

pytestmark = pytest.mark.unit


def amdahl(serial: float) -> Callable[[Layout], float]:
    """A second for one worker, of which a share is serial."""
    return lambda layout: serial + (1 - serial) * layout.widest / layout.shards


def training(step_s: Callable[[Layout], float], workers: int = 1, shards: int = 8, **more: Any) -> SimulatedTraining:
    policy = ScalingPolicy(**more.pop("policy", {}))
    return SimulatedTraining(policy, step_s, Layout(workers, 64, shards), **more)


def cost(workers: int, price: float, step_s: Callable[[Layout], float], shards: int = 8) -> float:
    return (1 + price * workers) * step_s(Layout(workers, 64, shards))


@pytest.mark.parametrize("start", [1, 4, 8])
@pytest.mark.parametrize("serial", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("price", [0.0, 0.1, 0.3, 1.0, 3.0])
def test_it_settles_where_a_step_costs_least(price: float, serial: float, start: int) -> None:
    truth = amdahl(serial)
    found = training(truth, start, jitter=0.05, policy={"price": price}).run(1000)
    best = min(cost(workers, price, truth) for workers in useful_sizes(8, 1, 8))
    assert cost(found.layout.workers, price, truth) <= 1.06 * best  # the margin, and a little noise
    before = len(found.said("resize"))
    found.run(900)
    assert len(found.said("resize")) <= before + 3


def test_by_amdahls_law_that_is_the_root_of_the_parallel_by_the_serial_share() -> None:
    serial, price = 0.1, 0.25  # √(0.9 / (0.25 · 0.1)) = 6
    found = training(amdahl(serial), shards=60, policy={"price": price, "margin": 0.001}).run(1500)
    assert found.layout.workers == 6


def test_it_does_not_flap_under_noise() -> None:
    found = training(amdahl(0.3), jitter=0.3, policy={"price": 0.3, "again_s": 1e9}).run(10000)
    assert len(found.said("resize")) <= 15
    assert len([step for step, _ in found.decided if step > 2000]) <= 6


def test_workers_that_a_neighbour_makes_useless_are_dropped_and_come_back_after_a_while() -> None:
    calm = amdahl(0.01)
    found = training(calm, policy={"again_s": 100.0}, jitter=0.05).run(500)
    assert found.layout.workers == 8
    # a neighbour takes all cores but two: more workers than that only wait for each other
    found.step_s = lambda layout: calm(layout) if layout.workers <= 2 else 0.6 + 0.05 * layout.workers
    found.run(1000)
    assert found.layout.workers == 2
    found.step_s = calm
    found.run(6000)
    assert found.layout.workers == 8


def test_a_larger_number_is_not_tried_where_it_would_not_pay_if_it_scaled_perfectly() -> None:
    found = training(amdahl(0.0), policy={"price": 20.0}).run(500)
    assert found.decided == []


def test_it_keeps_to_its_bounds_from_the_first_figure_on() -> None:
    assert training(amdahl(0.0), 1, policy={"fewest": 3, "most": 4}).run(300).said("resize") == [3, 4]
    assert training(amdahl(0.9), 8, policy={"price": 9.0, "fewest": 3, "most": 4}).run(300).layout.workers == 3


def test_what_cannot_be_had_is_asked_for_again_only_after_a_while() -> None:
    found = training(amdahl(0.01), policy={"again_s": 1000.0}, room=2).run(1500)
    assert found.layout.workers == 2
    assert found.said("resize").count(3) == 1
    found.run(4000)
    assert found.said("resize").count(3) in (2, 3)


def test_nothing_is_compared_across_batches() -> None:
    found = training(lambda layout: layout.batch_size * amdahl(0.01)(layout), policy={"most": 2}).run(200)
    assert found.layout.workers == 2
    found.change(batch_size=512)  # eight times as slow: one worker with a small batch was faster than that
    found.run(200)
    assert found.said("resize") == [2, 1, 2]  # tried anew


def test_it_says_what_it_goes_by() -> None:
    found = training(amdahl(0.3), policy={"price": 0.3}).run(200)
    assert dict(found.decided[1][1].why) == pytest.approx(
        {"before": 2, "price": 0.3, "step_s_1": 1.0, "step_s_2": 0.65}
    )


@pytest.mark.parametrize(
    "wrong",
    [{"price": -1}, {"margin": 1.0}, {"patience": 0}, {"again_s": 0}, {"fewest": 0}, {"fewest": 4, "most": 2}],
)
def test_words_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        ScalingPolicy(**wrong)
