import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.adapt.norms import Average, GradientNorms, Noise, NoiseAverage, loss_variance

pytestmark = pytest.mark.unit


def test_an_average_is_not_drawn_to_where_it_began() -> None:
    average = Average(0.9)
    assert average.value is None
    assert average.after(5.0).value == pytest.approx(5.0)
    assert average.after(5.0).after(5.0).value == pytest.approx(5.0)
    assert average.after(0.0).after(1.0).value == pytest.approx(1 / 1.9)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_an_average_that_forgets_nothing_or_too_much_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        Average(decay)


SIGNAL, VARIANCE = 0.3, 40.0  # so the noise scale is 133 samples


def norms(draw: np.random.Generator, sizes: list[int], dimensions: int = 400) -> GradientNorms:
    """Of gradients with a known mean and a known covariance."""
    mean = np.full(dimensions, np.sqrt(SIGNAL / dimensions))
    groups = [mean + draw.normal(0, np.sqrt(VARIANCE / dimensions / size), dimensions) for size in sizes]
    total = np.average(groups, axis=0, weights=sizes)
    return GradientNorms([float(group @ group) for group in groups], sizes, float(total @ total))


@pytest.mark.parametrize("sizes", [[16] * 8, [16, 16], [16, 16, 16, 3]])
def test_the_noise_scale_is_found_by_averaging(sizes: list[int]) -> None:
    draw = np.random.default_rng(1)
    seen = NoiseAverage.of(0.9999)
    for _ in range(6000):
        seen = seen.after(norms(draw, sizes))
    assert seen.noise is not None
    assert seen.noise.variance == pytest.approx(VARIANCE, rel=0.05)
    assert seen.noise.scale == pytest.approx(VARIANCE / SIGNAL, rel=0.1)


def test_one_shard_says_nothing_of_the_noise() -> None:
    single = GradientNorms([2.0], [16], 2.0)
    assert not single.are_enough
    assert NoiseAverage().after(single).noise is None
    with pytest.raises(ValueError, match="at least 2 shards"):
        _ = single.noise


@given(st.floats(0.0, 1e6), st.floats(-1e3, 1e3), st.integers(1, 512), st.integers(1, 64))
def test_a_gain_is_never_below_one_step_and_never_above_what_as_many_samples_could_bring(
    variance: float, signal: float, base: int, factor: int
) -> None:
    assert 1.0 <= Noise(variance, signal).gain(base, base * factor) <= factor


def test_pure_noise_is_worth_averaging_and_a_clear_signal_is_not() -> None:
    assert Noise(variance=100.0, signal=0.0).gain(16, 128) == pytest.approx(8.0)
    assert Noise(variance=1e-9, signal=1.0).gain(16, 128) == pytest.approx(1.0)


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=8), st.integers(1, 64))
def test_the_gain_is_adascales_own_where_shards_are_base_batches(groups: list[float], size: int) -> None:
    count = len(groups)
    mean = random.Random(size).uniform(0.2, 1.0) * sum(groups) / count
    sigma = sum(groups) / (count - 1) - count / (count - 1) * mean
    mu = mean - sigma / count
    noise = GradientNorms(groups, [size] * count, mean).noise
    assert noise.variance / size == pytest.approx(sigma, rel=1e-6, abs=1e-9)
    assert noise.signal == pytest.approx(mu, rel=1e-6, abs=1e-6)
    if mu > 0 and sigma > 0:
        expected = (sigma + mu) / (sigma / count + mu)
        assert noise.gain(size, size * count) == pytest.approx(expected, rel=1e-6)


def test_large_batches_are_efficient_while_they_are_below_the_noise_scale() -> None:
    noise = Noise(variance=1000.0, signal=1.0)
    assert noise.efficiency(10, 10) == 1.0
    assert noise.efficiency(10, 100) == pytest.approx(1010 / 1100)
    assert noise.efficiency(10, 100_000) < 0.02


@pytest.mark.parametrize("sizes", [[16] * 8, [16, 16, 16, 3]])
def test_the_variance_of_a_samples_loss_is_found_from_means(sizes: list[int]) -> None:
    draw = np.random.default_rng(2)
    found = [loss_variance([draw.normal(1.0, 3.0, size).mean() for size in sizes], sizes) for _ in range(4000)]
    assert np.mean([one for one in found if one is not None]) == pytest.approx(9.0, rel=0.05)
    assert loss_variance([1.0], [16]) is None
