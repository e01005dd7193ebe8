import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from unisono.data.order import BLOCK, KeyedOrder
from unisono.data.shards import ShardSource, ShardsRequest
from unisono.data.streams import generators_kept
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
