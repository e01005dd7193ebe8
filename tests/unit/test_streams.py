import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from unisono.data.generators import Generators, generators_kept, seed_generators
from unisono.plan.order import Stream, stream_seed

pytestmark = pytest.mark.unit


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_different_keys_give_different_seeds() -> None:
    seeds = {
        stream_seed(seed, stream, *key)
        for seed in (0, 1, -1)
        for stream in Stream
        for key in ((), (0,), (1,), (0, 1), (1, 0), (0, 0, 1))
    }
    assert len(seeds) == 3 * len(Stream) * 6


def test_seeds_are_part_of_the_promise_and_never_change() -> None:
    assert stream_seed(0, Stream.SHARD, 1, 0, 2) == SHARD_SEED


def test_seeding_sets_torch_numpy_and_python() -> None:
    with generators_kept():
        seed_generators(5)
        first = draws()
        draws()
        seed_generators(5)
        again = draws()
        seed_generators(6)
        other = draws()
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_what_is_drawn_inside_leaves_no_trace_outside() -> None:
    before = Generators.capture()
    expected = draws()
    before.restore()
    with generators_kept():
        seed_generators(1)
        draws()
    assert draws() == expected


DRAWN = {
    "nothing": lambda: None,
    "a uniform number": np.random.rand,
    "a normal number": np.random.normal,
    "a seed": lambda: np.random.seed(7),
}


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
def test_numpy_goes_on_where_it_was_whether_or_not_anything_was_drawn_since_it_was_seeded(
    drawn: Callable[[], object],
) -> None:
    with generators_kept():
        seed_generators(3)
        drawn()  # of two normal numbers the second one is kept for later
        expected = [*np.random.normal(size=3), np.random.rand()]
        seed_generators(3)
        drawn()
        with generators_kept():
            seed_generators(4)
            np.random.normal()
            with generators_kept():
                seed_generators(5)
        assert [*np.random.normal(size=3), np.random.rand()] == expected


def test_the_memory_of_numpys_generator_is_read_and_not_copied() -> None:
    with generators_kept():
        seed_generators(3)
        assert Generators.capture().numpy == 3


def test_the_fast_way_of_seeding_torch_gives_the_numbers_of_manual_seed() -> None:
    with generators_kept():
        torch.manual_seed(2**63 + 11)
        expected = torch.rand(5)
        seed_generators(2**63 + 11)
        assert torch.equal(torch.rand(5), expected)


SHARD_SEED = 4764157554146558407
