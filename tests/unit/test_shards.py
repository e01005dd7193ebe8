import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from unisono.data.generators import generators_kept, seed_generators
from unisono.data.sample_order import BLOCK, KeyedOrder
from unisono.data.shards import LocatedShards, ShardSource, ShardsRequest
from unisono.errors import DataError, UnisonoWarning
from unisono.plan.order import sample_order

pytestmark = pytest.mark.unit


class Noise(Dataset[torch.Tensor]):
    """Every sample is three random numbers, one of each generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([torch.rand(1).item(), float(np.random.rand()), random.random()])


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    with generators_kept():
        yield


def drawn(dataset: Any, start: int, stop: int, *, epoch: int = 0, seed: int = 0) -> Any:
    (batch,) = ShardSource(dataset, KeyedOrder(len(dataset), seed)).load(ShardsRequest(epoch, (range(start, stop),)))
    return batch


def test_what_a_sample_draws_does_not_depend_on_the_samples_beside_it() -> None:
    assert torch.equal(drawn(Noise(), 1, 3)[1], drawn(Noise(), 2, 4)[0])


class Cached(Noise):
    """Keeps what it has drawn."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class ByChance(Noise):
    """Draws from a generator that nobody has seeded."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(random.SystemRandom().random())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Cached(), r"sample 7 of the data set \(Cached\) drew something when it was asked for, and nothing when"),
    ],
)
def test_samples_that_depend_on_who_has_asked_before_are_warned_of_once(dataset: Any, message: str) -> None:
    source = ShardSource(dataset, KeyedOrder(20, 0, shuffle=False))
    with pytest.warns(UnisonoWarning, match=message):
        source.load(ShardsRequest(0, (range(7, 7), range(7, 9))))
    source.load(ShardsRequest(0, (range(9, 12),)))


def test_the_same_holds_for_a_subset_which_could_fetch_many_samples_at_once() -> None:
    subset = Subset(Noise(), [5, 6, 7, 8])
    assert torch.equal(drawn(subset, 1, 3)[1], drawn(subset, 2, 4)[0])


def test_another_sample_epoch_or_seed_draws_other_numbers() -> None:
    draws = [drawn(Noise(), 1, 2), drawn(Noise(), 2, 3), drawn(Noise(), 1, 2, epoch=1), drawn(Noise(), 1, 2, seed=1)]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 4
    assert all(len(set(draw.flatten().tolist())) == 3 for draw in draws)


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.randn(20, 3), torch.arange(20)),
        Subset(TensorDataset(torch.randn(40, 3, 2), torch.arange(40)), list(range(-5, 15))),
        Subset(Subset(TensorDataset(torch.arange(40.0)), range(30)), torch.randperm(20).tolist()),
    ],
    ids=["whole", "a part, with negative indices", "a part of a part"],
)
def test_a_tensor_data_set_is_gathered_to_the_same_batch_as_it_would_be_collated(dataset: Any) -> None:
    quick = drawn(dataset, 3, 12)
    collated = default_collate([dataset[index] for index in range(3, 12)])
    assert type(quick) is type(collated)
    assert all(torch.equal(left, right) for left, right in zip(quick, collated, strict=True))
    assert [part.stride() for part in quick] == [part.stride() for part in collated]


def test_an_empty_shard_has_no_batch() -> None:
    assert drawn(Noise(), 5, 5) is None


@pytest.mark.parametrize("places", [range(7), range(BLOCK - 3, BLOCK + 2), range(9000, 9001), range(3, 2 * BLOCK + 8)])
def test_shuffled_places_are_those_of_the_epochs_order_also_where_blocks_of_it_meet(places: range) -> None:
    source = ShardSource(TensorDataset(torch.arange(9001)), KeyedOrder(9001, seed=3, shuffle=True))
    cut = (places[:2], places[2:2], places[2:])
    found = [batch[0].tolist() if batch else [] for batch in source.load(ShardsRequest(5, cut))]
    expected = sample_order(3, 5, 9001)(np.array(places)).tolist()
    assert [sample for part in found for sample in part] == expected
    assert [len(part) for part in found] == [len(part) for part in cut]


def test_an_error_of_the_data_set_names_the_sample() -> None:
    class Broken(Noise):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise FileNotFoundError(f"{index}.png")

    with pytest.raises(FileNotFoundError, match="4.png") as caught:
        drawn(Broken(), 4, 6)
    assert caught.value.__notes__ == ["(while sample 4 of the data set was loaded)"]


# -- samples that draw, and samples that do not -----------------------------------------------------------------------


class Quiet(Noise):
    """Draws nothing, unless it is told to for some samples; counts how often it is asked."""

    def __init__(self, drawing: Sequence[int] = ()) -> None:
        self.drawing, self.asked = drawing, list[int]()

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return super().__getitem__(index) if index in self.drawing else torch.full((3,), float(index))


def reference(dataset: Any, places: range, collate: Any = default_collate) -> Any:
    """What comes of seeding all generators before each sample."""
    order, samples = KeyedOrder(20, 0), []
    for place in places:
        seed_generators(order.stream(0, place, place))
        samples.append(dataset[place])
    return collate(samples)


def shaken(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.randn(3) + float(np.random.rand()) + random.random()


CUT = (range(4), range(4, 9), range(9, 9), range(9, 20))


@pytest.mark.parametrize("drawing", [(), range(20), (6,), (19,), (0, 12)], ids=["none", "all", "one", "last", "two"])
@pytest.mark.parametrize("collate", [None, shaken], ids=["plain", "a collate function that draws"])
def test_samples_are_those_that_a_seed_before_each_of_them_gives(drawing: Sequence[int], collate: Any) -> None:
    source = ShardSource(Quiet(drawing), KeyedOrder(20, 0), collate)
    for cut in (CUT, CUT[1:2], CUT):
        found = source.load(ShardsRequest(0, cut))
        for places, batch in zip(cut, found, strict=True):
            expected = reference(Quiet(drawing), places, collate or default_collate) if places else None
            assert (batch is None) if expected is None else torch.equal(batch, expected)


def test_a_data_set_that_draws_is_asked_for_one_sample_twice_in_vain_and_another_for_none_but_the_first() -> None:
    for drawing, often in ((range(20), [0, 0, *range(9)]), ((), [0, *range(9)]), ((7,), [0, *range(9), *range(9)])):
        dataset = Quiet(drawing)
        source = ShardSource(dataset, KeyedOrder(20, 0))
        source.load(ShardsRequest(0, CUT[:2]))
        assert dataset.asked == often
        source.load(ShardsRequest(0, CUT[3:]))
        assert dataset.asked == [*often, *range(9, 20)]


def test_samples_that_seed_the_generators_themselves_leave_no_trace_on_others() -> None:
    class Seeding(Noise):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index % 5 == 1:
                random.seed(index)
            return super().__getitem__(index) if index % 5 == 2 else torch.zeros(3)

    (batch,) = ShardSource(Seeding(), KeyedOrder(20, 0)).load(ShardsRequest(0, (range(20),)))
    assert torch.equal(batch, reference(Seeding(), range(20)))


def test_what_fails_only_with_numbers_that_were_not_meant_for_it_does_not_fail() -> None:
    meant = {reference(Noise(), range(place, place + 1)).sum().item() for place in range(20)}

    class Picky(Noise):
        def __getitem__(self, index: int) -> torch.Tensor:
            found = super().__getitem__(index)
            if found.sum().item() not in meant:
                raise ValueError("another number")
            return found

    assert drawn(Picky(), 0, 20).shape == (20, 3)


class Many(Quiet):
    """Fetches many samples at once; those that draw are shifted together."""

    def __init__(self, drawing: Sequence[int] = ()) -> None:
        super().__init__(drawing)
        self.asked_at_once = list[list[int]]()

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.asked_at_once.append(indices)
        shift = torch.rand(1) if self.drawing else torch.zeros(1)
        return [torch.full((3,), float(index)) + shift for index in indices]


@pytest.mark.parametrize("make", [lambda one: one, lambda one: Subset(one, range(20))], ids=["itself", "a part of it"])
@pytest.mark.parametrize("drawing", [(), (1,)], ids=["quiet", "drawing"])
def test_a_data_set_that_fetches_many_samples_at_once_is_asked_for_whole_shards(make: Any, drawing: Any) -> None:
    dataset = Many(drawing)
    source = ShardSource(make(dataset), KeyedOrder(20, 0))
    together = source.load(ShardsRequest(0, CUT))
    assert dataset.asked_at_once == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [*range(9, 20)]]
    alone = [source.load(ShardsRequest(0, (places,)))[0] for places in CUT[::-1]][::-1]
    shifts = set()
    for places, one, other in zip(CUT, together, alone, strict=True):
        assert (one is None and other is None) if not places else torch.equal(one, other)
        if places:
            shifts.add((one - reference(Quiet(), places)).mean().item())
    assert len(shifts) == 3 if drawing else shifts == {0.0}


def test_a_data_set_that_fetches_too_few_samples_at_once_is_named() -> None:
    class Short(Many):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return super().__getitems__(indices)[1:]

    with pytest.raises(DataError, match="Short.__getitems__ returned 3 samples for 4 indices"):
        drawn(Short(), 0, 4)


def test_indices_below_0_count_from_the_end_and_those_beyond_are_named() -> None:
    def chosen(*indices: int) -> list[int]:
        request = ShardsRequest(0, (range(len(indices)),))
        source = ShardSource(TensorDataset(torch.arange(20)), KeyedOrder(20, 0))
        ((found,),) = source.fetch(LocatedShards(request, (np.array(indices),)))
        return list(found.tolist())

    assert chosen(-1, 3, -20) == [19, 3, 0]
    for beyond in (20, -21):
        with pytest.raises(DataError, match=f"gave the index {beyond}, and the data set has 20 samples"):
            chosen(0, beyond)


def test_a_data_set_that_stops_an_iteration_ends_no_loop() -> None:
    class Stops(Noise):
        def __getitem__(self, index: int) -> torch.Tensor:
            return next(iter([]))

    with pytest.raises(DataError, match=r"sample \d+ of the data set: .*StopIteration"):
        drawn(Stops(), 0, 4)
