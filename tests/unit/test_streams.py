import random

import numpy as np
import pytest
import torch

from unisono.data.streams import Generators, generators_kept, seed_generators
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


def test_the_fast_way_of_seeding_torch_gives_the_numbers_of_manual_seed() -> None:
    with generators_kept():
        torch.manual_seed(2**63 + 11)
        expected = torch.rand(5)
        seed_generators(2**63 + 11)
        assert torch.equal(torch.rand(5), expected)


SHARD_SEED = 4764157554146558407
