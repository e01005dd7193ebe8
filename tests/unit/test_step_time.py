"""The model of a step's time, and what is known of it after a few figures."""

import random
import subprocess
import sys

import pytest

from unisono.adapt.layouts import Layout, StepTime, fit, useful_sizes

pytestmark = pytest.mark.unit

TRUTH = StepTime(a_c=0.004, b_c=0.0005, a_r=0.006, b_r=0.001, gamma=3.0)


def layout(workers: int, batch: int = 64, shards: int = 8) -> Layout:
    return Layout(workers, batch, shards)


def test_the_time_is_that_of_the_formula() -> None:
    # 8 samples per shard: T_grad = 4 + 0.5 * 8 = 8 ms; with 4 workers T_sync = 6 + 1 * 2 = 8 ms
    assert TRUTH.seconds(layout(1)) == pytest.approx(8 * 0.008)
    assert TRUTH.seconds(layout(4)) == pytest.approx(0.008 + (2 * 0.008**3) ** (1 / 3))
    assert TRUTH.seconds(layout(3)) == pytest.approx(2 * 0.008 + (0.008**3 + 0.007**3) ** (1 / 3))
    assert StepTime(0.0, 0.0, 0.0, 0.0, 2.0).seconds(layout(2)) == pytest.approx(0, abs=1e-9)


def test_a_worker_has_whole_shards_of_the_job_however_fine_they_are_cut() -> None:
    finer = Layout(3, 64, 16, cut=4)  # the job has 4 shards: 2, 1 and 1
    assert (finer.job_shards, finer.widest, finer.shard_size) == (4, 8, 4.0)


def test_useful_numbers_of_workers_are_those_at_which_the_busiest_has_fewer_shards() -> None:
    assert useful_sizes(8, 1, 8) == (1, 2, 3, 4, 8)
    assert useful_sizes(12, 1, 12) == (1, 2, 3, 4, 6, 12)
    assert useful_sizes(8, 5, 7) == (5,)
    assert useful_sizes(4, 1, 100) == (1, 2, 4)
    assert useful_sizes(4, 6, 100) == (4,)


@pytest.mark.parametrize("seed", range(10))
def test_a_fit_foretells_times_between_and_near_those_that_were_seen(seed: int) -> None:
    chance = random.Random(seed)
    shard_s, share = 10 ** chance.uniform(-4, 0), chance.random()
    truth = StepTime(
        a_c=shard_s * share,
        b_c=shard_s * (1 - share) / 8,
        a_r=shard_s * 10 ** chance.uniform(-1, 0.7),
        b_r=shard_s * 10 ** chance.uniform(-2, 0),
        gamma=chance.uniform(1, 10),
    )
    tried = [(1, 64), (1, 128), (2, 128), (3, 128), (4, 128), (4, 256), (8, 256)]
    seen = {layout(*one): truth.seconds(layout(*one)) * chance.gauss(1, 0.01) for one in tried}
    found = fit(seen)
    for workers, batch in [(1, 256), (2, 256), (3, 256), (4, 512), (8, 512)]:
        assert found.seconds(layout(workers, batch)) == pytest.approx(truth.seconds(layout(workers, batch)), rel=0.1)


def test_what_is_not_known_is_taken_to_be_favourable() -> None:
    alone = fit({layout(1): 0.064})
    assert (alone.b_c, alone.a_r, alone.b_r) == (0, 0, 0)
    assert alone.seconds(layout(1, 128)) == pytest.approx(0.064, rel=1e-3)  # larger shards may be free
    assert alone.seconds(layout(2)) == pytest.approx(0.032, rel=1e-3)  # and so may another worker
    two = fit({layout(1): 0.064, layout(1, 128): 0.096, layout(2): 0.040})
    assert two.seconds(layout(1, 96)) == pytest.approx(0.080, rel=0.02)
    assert two.a_r > 0
    assert two.b_r == 0


def test_parameters_keep_to_their_bounds_whatever_was_timed() -> None:
    chance = random.Random(0)
    for _ in range(5):
        seen = {layout(w, b): 10 ** chance.uniform(-3, 0) for w in (1, 2, 4, 8) for b in (64, 128)}
        found = fit(seen)
        assert min(found.a_c, found.b_c, found.a_r, found.b_r) >= 0
        assert 1 <= found.gamma <= 10


def test_the_same_figures_in_any_order_give_the_same_bits() -> None:
    seen = {layout(w, b): TRUTH.seconds(layout(w, b)) * (1 + 0.01 * w) for w in (1, 2, 4) for b in (64, 128)}
    assert fit(seen) == fit(dict(reversed(list(seen.items()))))


def test_nothing_can_be_fitted_to_nothing() -> None:
    with pytest.raises(ValueError, match="nothing"):
        fit({})


def test_scipy_is_loaded_by_the_first_fit_alone() -> None:
    code = """
import sys
import unisono
unisono.GoodputPolicy(largest=64), unisono.ScalingPolicy(), unisono.SpotPolicy(dict)
assert "scipy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
