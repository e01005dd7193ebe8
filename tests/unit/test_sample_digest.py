"""The digest of a sample: other where samples differ, and the same where only processes do."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from unisono.data.content import MOST_BYTES, MOST_PARTS, PLAIN_PLACES, Glance, content_of_samples, digest_of, evenly
from unisono.data.generators import generators_in, own_generators_kept
from unisono.data.loading import NO_PROCESSES
from unisono.data.sample_order import KeyedOrder
from unisono.data.shards import ShardSource

pytestmark = pytest.mark.unit


@dataclass
class Pair:
    """A sample of two parts."""

    one: Any
    other: Any


DIFFERENT = [
    (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])),
    (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    (torch.zeros(4 * MOST_BYTES), torch.cat([torch.zeros(4 * MOST_BYTES - 1), torch.ones(1)])),
    (np.zeros(3), np.ones(3)),
    (np.array(["a", None]), np.array(["b", None])),
    (Image.new("L", (4, 4), 0), Image.new("L", (4, 4), 1)),
    (1, 2),
    (1, True),
    (0.5, 0.25),
    ("one", "other"),
    (b"one", b"other"),
    ("/here/one.png", "/here/other.png"),
    (Path("/here/one.png"), Path("/here/other.png")),
    (Decimal("0.1"), Decimal("0.2")),
    ([1, 2, 3], [1, 2, 4]),
    ([[1, 2], [3]], [[1], [2, 3]]),
    (["a", "b"], ["ab", ""]),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": 2}),
    (UserDict(a=[1]), UserDict(a=[2])),
    ({1, 2}, {1, 3}),
    (Pair(1, object()), Pair(2, object())),
    ((torch.zeros(3), 1), (torch.zeros(3), 2)),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_samples_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert digest_of(one) != digest_of(other)


SAME = [
    (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])),
    (torch.zeros(2, 3).t(), torch.zeros(3, 2)),
    (float("nan"), float("nan")),
    ("/here/one.png", "/there/one.png"),
    (Path("/here/one.png"), Path("/elsewhere/x1/one.png")),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a", "b", "c"}, {"c", "b", "a"}),
    (object(), object()),
    (iter([1]), iter([2])),
    ({"a": object(), "b": 1}, {"a": object(), "b": 1}),
    (torch.zeros(3).to_sparse(), torch.ones(3).to_sparse()),
    (torch.zeros(3, device="meta"), torch.zeros(3, device="meta")),
    (np.array([object()]), np.array([object()])),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_differs_in_processes_alone_has_the_same_digest(one: Any, other: Any) -> None:
    assert digest_of(one) == digest_of(other)


def test_what_lies_in_itself_has_a_digest() -> None:
    endless: list[Any] = ["a"]
    endless.append(endless)
    assert digest_of(endless)


def test_what_has_too_many_parts_is_left_out_whatever_comes_first_in_it() -> None:
    endless: list[Any] = []
    endless += [endless] * 16
    names = [str(number) for number in range(2 * MOST_PARTS)]
    assert digest_of(endless) == digest_of({*names}) == digest_of({"a": {*names[1:]}}) != digest_of({*names[:9]})


def test_each_place_of_data_in_memory_counts() -> None:
    def content(odd: int, *, is_again: bool = False) -> str:
        data = TensorDataset(torch.arange(PLAIN_PLACES) == odd)
        look = Glance(1, 1, is_again=is_again)
        return content_of_samples(ShardSource(data, KeyedOrder(len(data), 0)), NO_PROCESSES, look)

    assert len({content(odd) for odd in range(PLAIN_PLACES)}) == PLAIN_PLACES
    assert len({content(odd, is_again=True) for odd in range(PLAIN_PLACES)}) == 2  # of one place, when they come again


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 1000])
def test_places_lie_evenly_from_the_first_to_the_last(count: int) -> None:
    places = evenly(count, 5)
    assert len(places) == min(count, 5) == len(set(places))
    assert not count or (places[0], places[-1]) == (0, count - 1)


def test_generators_of_its_own_are_as_they_were_after_an_object_was_asked() -> None:
    class Parts:
        def __init__(self) -> None:
            self.own = np.random.default_rng(1)
            self.steps = [{"draws": np.random.RandomState(2)}, torch.Generator().manual_seed(3)]
            self.back = self

    parts = Parts()
    generators = generators_in(parts)
    assert len(generators) == 3

    def draw() -> tuple[float, float, float]:
        drawn = torch.rand(1, generator=parts.steps[1])  # type: ignore[call-overload]
        return parts.own.random(), parts.steps[0]["draws"].random(), float(drawn)  # type: ignore[index]

    with own_generators_kept(generators):
        drawn = draw()
    assert draw() == drawn
