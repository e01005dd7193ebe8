"""Units of a model in slices are gathered in the same memory, but never in memory that somebody still reads."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from unisono.train.step.sliced_gradients import LARGEST_KEPT, Gathering

pytestmark = pytest.mark.unit


@pytest.fixture
def gathering() -> Gathering:
    return Gathering(cast("Any", None))


def allocated(gathering: Gathering, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return gathering.allocate((numel,), dtype=dtype, device=torch.device("cpu"))


def test_memory_that_nobody_reads_any_more_is_used_again(gathering: Gathering) -> None:
    first = allocated(gathering, 96)
    place = first.data_ptr()
    part = first.narrow(0, 32, 32)
    del first
    assert allocated(gathering, 96).data_ptr() != place  # a part of it is still read
    del part
    assert allocated(gathering, 96).data_ptr() == place


def test_units_that_are_gathered_at_the_same_time_have_memory_of_their_own(gathering: Gathering) -> None:
    held = [allocated(gathering, 96) for _ in range(3)]
    assert len({each.data_ptr() for each in held}) == 3
    places = {each.data_ptr() for each in held}
    held.clear()
    assert {each.data_ptr() for each in [allocated(gathering, 96) for _ in range(3)]} == places
    assert allocated(gathering, 96, torch.bfloat16).dtype == torch.bfloat16


def test_large_memory_is_given_back(gathering: Gathering) -> None:
    allocated(gathering, LARGEST_KEPT // 4 + 1)
    assert gathering._kept == {}
