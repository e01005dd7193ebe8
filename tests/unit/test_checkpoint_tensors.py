from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from same_trees import same
from unisono.checkpoint.tensor_bytes import copies, pieces, read_tensors
from unisono.errors import CheckpointError

pytestmark = pytest.mark.unit

EXAMPLES = {
    "weight": torch.randn(3, 5),
    "half": torch.randn(3).to(torch.bfloat16),
    "flag": torch.tensor(True),
    "step": torch.tensor(7),
    "double": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64),
    "nothing": torch.empty(0, 3),
    "byte": torch.tensor([255], dtype=torch.uint8),
    "wörter/🎻": torch.arange(3, dtype=torch.int16),
    "transposed": torch.randn(4, 2).t(),
}


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.write_bytes(b"".join(pieces(copies(tensors))))
    return path


def test_the_library_reads_what_is_written_here(tmp_path: Path) -> None:
    found = safetensors.torch.load_file(written(tmp_path / "some.safetensors", EXAMPLES))
    assert found.keys() == EXAMPLES.keys()
    assert all(same(found[name], tensor) for name, tensor in EXAMPLES.items())


def test_a_file_without_a_tensor_is_a_file(tmp_path: Path) -> None:
    assert read_tensors(written(tmp_path / "empty.safetensors", {})) == {}


def test_every_tensor_is_aligned_to_its_element() -> None:
    parts = list(pieces(copies(EXAMPLES)))
    position = len(parts[0]) + len(parts[1])
    for tensor, part in zip((t for t in copies(EXAMPLES).values() if t.numel()), parts[2:], strict=True):
        assert position % tensor.itemsize == 0
        position += len(part)


def test_copies_lie_row_by_row_so_that_writing_makes_no_more_of_them() -> None:
    assert all(tensor.is_contiguous() for tensor in copies(EXAMPLES).values())


def test_copies_do_not_see_later_updates() -> None:
    weight = torch.zeros(3)
    copied = copies({"weight": weight})["weight"]
    weight.add_(1)
    assert copied.tolist() == [0, 0, 0]


def test_what_was_read_outlives_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "some.safetensors", {"weight": torch.ones(2**14)})
    found = read_tensors(path)["weight"]
    path.write_bytes(b"\0" * path.stat().st_size)
    assert found.sum() == 2**14


def test_a_dtype_that_the_format_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"layer\.weight has the dtype torch\.complex128"):
        copies({"layer.weight": torch.zeros(2, dtype=torch.complex128)})
