"""`topology="auto"`: the fastest one, by numbers that all workers share."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from unisono.reduce.buckets import Bucket
from unisono.reduce.exchange import ENOUGH_S, REPETITIONS, Choice

pytestmark = pytest.mark.unit

NAMES = ("direct", "ring", "star")


def bucket(size: int) -> Bucket:
    return Bucket((), size // 4, torch.float32, torch.device("cpu"))


def taking(**seconds: float) -> Callable[[str], Callable[[], float]]:
    return lambda name: lambda: seconds[name]


def test_the_fastest_is_taken_for_sizes_of_its_class() -> None:
    choice = Choice(NAMES)
    assert choice.measure(bucket(4096), taking(direct=3e-3, ring=2e-3, star=4e-3)) == {
        "direct": 3e-3,
        "ring": 2e-3,
        "star": 4e-3,
    }
    assert choice.topology(4096) == "ring"


def test_a_size_that_nobody_measured_goes_the_way_of_the_nearest_one() -> None:
    choice = Choice(NAMES)
    assert choice.topology(4096) == "direct"
    choice.measure(bucket(2**12), taking(direct=3.0, ring=2.0, star=1.0))
    choice.measure(bucket(2**24), taking(direct=3.0, ring=2.0, star=4.0))
    assert [choice.topology(size) for size in (256, 2**13, 2**23, 2**27)] == ["star", "star", "ring", "ring"]


def test_of_each_class_of_sizes_the_largest_bucket_is_measured_once() -> None:
    choice = Choice(NAMES)
    sizes = [2**22, 2**10, 2**22 + 4096, 2**10 + 512]
    assert choice.open(map(bucket, sizes)) == [bucket(2**10 + 512), bucket(2**22 + 4096)]
    choice.measure(bucket(2**10), taking(direct=1, ring=1, star=1))
    assert choice.open(map(bucket, sizes)) == [bucket(2**22 + 4096)]


def test_where_there_is_no_choice_nothing_is_measured() -> None:
    assert Choice(["tree"]).open([bucket(4096)]) == []
    assert Choice(["tree"]).topology(4096) == "tree"


def test_what_takes_long_is_not_repeated_and_the_shortest_time_counts() -> None:
    tries: Counter[str] = Counter()

    def trial(name: str) -> Callable[[], float]:
        def once() -> float:
            tries[name] += 1
            return ENOUGH_S if name == "star" else ENOUGH_S / 100 / tries[name]

        return once

    seconds = Choice(NAMES).measure(bucket(2**24), trial)
    assert tries == {"direct": REPETITIONS, "ring": REPETITIONS, "star": 1}
    assert seconds["direct"] == ENOUGH_S / 100 / REPETITIONS
