import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from unisono.data.shards import ShardRequest, ShardSource
from unisono.data.streams import generators_kept

pytestmark = pytest.mark.unit


class Noise(Dataset[torch.Tensor]):
    """Every sample is three random numbers, one of each generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([torch.rand(1).item(), float(np.random.rand()), random.random()])


def drawn(dataset: Any, *indices: int, epoch: int = 0, seed: int = 0) -> torch.Tensor:
    batch: torch.Tensor = ShardSource(dataset, seed)[ShardRequest(epoch, indices)]
    return batch


def test_what_a_sample_draws_does_not_depend_on_the_samples_beside_it() -> None:
    assert torch.equal(drawn(Noise(), 1, 2)[1], drawn(Noise(), 2, 3)[0])


def test_the_same_holds_for_a_subset_which_could_fetch_many_samples_at_once() -> None:
    subset = Subset(Noise(), [5, 6, 7, 8])
    assert torch.equal(drawn(subset, 1, 2)[1], drawn(subset, 2, 3)[0])


def test_another_sample_epoch_or_seed_draws_other_numbers() -> None:
    draws = [drawn(Noise(), 1), drawn(Noise(), 2), drawn(Noise(), 1, epoch=1), drawn(Noise(), 1, seed=1)]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 4
    assert all(len(set(draw.flatten().tolist())) == 3 for draw in draws)


def test_loading_leaves_the_scripts_own_random_numbers_alone() -> None:
    with generators_kept():
        torch.manual_seed(1)
        expected = torch.rand(2)[1]
        torch.manual_seed(1)
        torch.rand(1)
        drawn(Noise(), 1, 2, 3)
        assert torch.rand(1) == expected


def test_a_tensor_data_set_is_gathered_to_the_same_batch_as_it_would_be_collated() -> None:
    data = TensorDataset(torch.randn(20, 3), torch.arange(20))
    quick = drawn(data, 4, 0, 7)
    collated = default_collate([data[index] for index in (4, 0, 7)])
    assert type(quick) is type(collated)
    assert all(torch.equal(left, right) for left, right in zip(quick, collated, strict=True))


def test_an_empty_shard_has_no_batch() -> None:
    assert drawn(Noise()) is None
