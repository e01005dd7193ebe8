"""Sums of the words of a device's memory are those of the same memory on the CPU."""

import pytest
import torch
from torch import Tensor

from unisono.train.model.at_rest import MOST_FLIPPED
from unisono.word_sums import flipped_bits
from unisono.words import THIRDS, DeviceWords, Words

pytestmark = pytest.mark.unit

SIZES = (0, 1, 2, 3, 5, 7, 64, 1001, 4095, 4096, 4097, 4098, 20_001)


def many() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
    made = [torch.randn(size, generator=generator).mul(1e3).to(kind) for size in SIZES for kind in kinds]
    whole = torch.randn(9001, generator=generator)
    flags = torch.randn(77, generator=generator) > 0
    return [*made, flags, torch.tensor(3.0), whole[1:], whole[2:4001], torch.randn(4, 6, generator=generator).t()]


def test_sums_are_those_of_the_same_memory_on_the_cpu() -> None:
    tensors = many()
    words = DeviceWords(tensors)
    for _ in range(2):
        sums = [sum(map(int, row)) % 2**64 for row in words.start()()]
        expected = [Words(tensor.as_strided((tensor.numel(),), (1,))).sum() for tensor in tensors]
        assert sums == expected
        for tensor in tensors:
            tensor.add_(1) if tensor.dtype != torch.bool else tensor.logical_not_()


@pytest.mark.parametrize("size", [3, 64, 1001, 20_001])
def test_a_flipped_bit_changes_one_third_and_what_a_script_writes_changes_more(size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(1))
    words = DeviceWords([tensor])
    before = words.start()()
    bits = tensor.view(torch.int32)
    bits[size // 2] ^= 1 << 20
    assert (words.start()() != before).sum() == 1
    assert 0 < flipped_bits(before, words.start()()) <= MOST_FLIPPED
    bits[size // 2] ^= 1 << 20
    assert (words.start()() == before).all()
    if size > THIRDS:
        tensor.mul_(0.5)
        assert (words.start()() != before).sum() == THIRDS


def test_memory_in_which_no_word_begins_where_it_does_is_read_all_the_same() -> None:
    shifted = torch.arange(33, dtype=torch.uint8)[3:]
    assert int(DeviceWords([shifted]).start()().sum()) == Words(shifted.clone()).sum()
