import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.order import Permutation, sample_order

pytestmark = pytest.mark.unit


@given(size=st.integers(1, 3000), key=st.integers(-(2**63), 2**63 - 1))
def test_the_sample_order_is_a_permutation(size: int, key: int) -> None:
    order = Permutation(size, key)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 10**6])
def test_a_large_sample_order_is_a_permutation_too(size: int) -> None:
    order = Permutation(size, 1)(np.arange(size))
    assert (np.bincount(order, minlength=size) == 1).all()


def test_any_entry_can_be_had_alone() -> None:
    order = sample_order(7, 3, 1797)
    whole = order(np.arange(1797))
    alone = [int(order(np.array([position]))[0]) for position in (0, 1, 900, 1796)]
    assert alone == whole[[0, 1, 900, 1796]].tolist()


def test_a_data_set_of_a_billion_samples_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        entries = sample_order(0, 0, 10**9)(np.arange(10**9 - 256, 10**9))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(entries.tolist())) == 256
    assert peak < 1_000_000


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {tuple(sample_order(seed, epoch, 50)(np.arange(50)).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_is_part_of_the_promise_and_never_changes() -> None:
    assert sample_order(0, 0, 10)(np.arange(10)).tolist() == FIRST_ORDER


@pytest.mark.parametrize("size", [2, 3, 10, pytest.param(64, marks=pytest.mark.slow)])
def test_every_sample_comes_to_every_place_about_equally_often(size: int) -> None:
    trials = 1500
    counts = np.zeros((size, size))
    for epoch in range(trials):
        counts[np.arange(size), sample_order(0, epoch, size)(np.arange(size))] += 1
    expected = trials / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    # Mean = freedom, standard deviation = sqrt(2 freedom): five of them is a one in a million event.
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom) + 1


FIRST_ORDER = [7, 5, 8, 4, 3, 0, 6, 1, 9, 2]
