"""The quick digest sees whatever a transfer could get wrong in one place."""

import pytest
import torch
from torch import Tensor

from unisono.train.model.tensors import checksum

pytestmark = pytest.mark.unit

TENSORS = {
    "weight": torch.linspace(-1, 1, 35).reshape(5, 7),
    "half": torch.arange(3, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
}


def flipped(tensor: Tensor, bit: int) -> Tensor:
    copy = tensor.clone().contiguous()
    copy.reshape(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return copy


def test_equal_tensors_have_equal_checksums_wherever_they_lie() -> None:
    odd = torch.arange(36, dtype=torch.uint8)[1:]  # a view that begins at an odd byte
    copies = {name: tensor.clone() for name, tensor in TENSORS.items()}
    assert checksum({**copies, "odd": odd.clone()}) == checksum({**TENSORS, "odd": odd})


@pytest.mark.parametrize("name", ["weight", "half", "scalar", "transposed"])
@pytest.mark.parametrize("bit", [0, 15])
def test_one_flipped_bit_gives_another_checksum(name: str, bit: int) -> None:
    assert checksum({**TENSORS, name: flipped(TENSORS[name], bit)}) != checksum(TENSORS)


def test_another_name_dtype_or_shape_gives_another_checksum() -> None:
    weight = TENSORS["weight"]
    same_words = {"weight": weight}
    others = [{"weights": weight}, {"weight": weight.t()}, {"weight": weight.view(torch.int32)}]
    assert len({checksum(one) for one in [same_words, *others]}) == 4
