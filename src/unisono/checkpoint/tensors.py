"""Tensors as a safetensors file, piece by piece.

Written here rather than by the library, whose writer hides the system's error number, leaves files that only their
owner can read, and in older releases copies everything once more. It is the library that reads them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from unisono.checkpoint.layout import KEPT, require_values
from unisono.errors import CheckpointError
from unisono.received import short


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that lie row by row, the largest elements first, as safetensors wants them.

    Raises:
        CheckpointError: a dtype that safetensors does not have; names the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in KEPT:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in KEPT)
            raise CheckpointError(f"{name} has the dtype {tensor.dtype}, which cannot be kept: use one of {kinds}")
    ordered = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    return {
        name: tensors[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name in ordered
    }


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
    # The library maps the file into memory. A copy stays what it is if the file goes.
    return {name: tensor.clone() for name, tensor in _checked(path.name, lambda: load_file(path)).items()}


def tensors_of(data: bytes) -> dict[str, Tensor]:
    """The tensors in the content of a safetensors file.

    Raises:
        CheckpointError: it is none; says why.
    """
    return _checked("what should be tensors", lambda: load(data))


def _checked(what: str, load: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        found = load()
    except (
        ArithmeticError,
        LookupError,
        MemoryError,
        OSError,
        RuntimeError,
        SafetensorError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
    for name, tensor in found.items():
        if tensor.dtype not in KEPT:
            raise CheckpointError(f"{what} cannot be read: {short(name)} has the dtype {tensor.dtype}")
        require_values(tensor)
    return found
