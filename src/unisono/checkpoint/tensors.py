"""Tensors as a safetensors file, piece by piece.

Written here rather than by the library, whose writer hides the system's error number, leaves files that only their
owner can read, and in older releases copies everything once more. It is the library that reads them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from warnings import catch_warnings, filterwarnings

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from unisono.checkpoint.layout import KEPT, require_values
from unisono.checkpoint.share import copied
from unisono.errors import CheckpointError
from unisono.received import parse_json, short


def copies(tensors: Mapping[str, Tensor], copy: Callable[[Tensor], Tensor | None] = copied) -> dict[str, Tensor]:
    """Copies on the CPU that lie row by row, the largest elements first, as safetensors wants them.

    Args:
        tensors: tensors by name.
        copy: a function that makes the copy of one; None for what is left out.

    Raises:
        CheckpointError: a dtype that safetensors does not have; names the tensor.
    """
    require_kept(tensors)
    ordered = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    return {name: made for name in ordered if (made := copy(tensors[name])) is not None}


def require_kept(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a dtype that safetensors does not have.

    Raises:
        CheckpointError: names the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in KEPT:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in KEPT)
            raise CheckpointError(f"{name} has the dtype {tensor.dtype}, which cannot be kept: use one of {kinds}")


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file, without another copy.

    Args:
        tensors: tensors by name, as :func:`copies` makes them.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": KEPT[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that every tensor is aligned
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in tensors.values():
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: it cannot be read; says why.
    """
    # A copy stays what it is if the file goes.
    return {name: tensor.clone() for name, tensor in mapped_tensors(path).items()}


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file where they lie in it: to be read, and not to be written to.

    They take no memory that the system could not take back. The file has to stay as it is.

    Raises:
        CheckpointError: it cannot be read; says why.
    """
    return _checked(path.name, lambda: _mapped(path))


def tensors_of(data: bytes) -> dict[str, Tensor]:
    """The tensors in the content of a safetensors file.

    Raises:
        CheckpointError: it is none; says why.
    """
    return _checked("what should be tensors", lambda: load(data))


DAMAGE = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)
"""What comes of a file that holds something else."""


def _checked(what: str, load: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        found = load()
    except DAMAGE as error:
        raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
    for name, tensor in found.items():
        if tensor.dtype not in KEPT:
            raise CheckpointError(f"{what} cannot be read: {short(name)} has the dtype {tensor.dtype}")
        require_values(tensor)
    return found


_NAMED = {name: dtype for dtype, name in KEPT.items()}


def _mapped(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "np") as file:  # which checks that tensors fill the file
        names = file.keys()
    with catch_warnings():
        filterwarnings("ignore", message=".*not writable")
        data = torch.from_numpy(np.memmap(path, np.uint8, "r"))
    begin = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    header = parse_json(data[8:begin].numpy().tobytes())
    return {name: _tensor(data[begin:], **header[name]) for name in names}


def _tensor(data: Tensor, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    if dtype not in _NAMED:
        raise ValueError(f"a tensor has the dtype {dtype}")
    piece = data[slice(*data_offsets)]
    is_aligned = piece.storage_offset() % _NAMED[dtype].itemsize == 0
    return (piece if is_aligned else piece.clone()).view(_NAMED[dtype]).reshape(shape)
