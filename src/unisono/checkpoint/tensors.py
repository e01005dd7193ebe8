"""Tensors as a safetensors file, piece by piece.

Written here rather than by the library, whose writer hides the system's error number, leaves files that only their
owner can read, and in older releases copies everything once more. It is the library that reads them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from unisono.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that lie row by row, the largest elements first, as safetensors wants them.

    Raises:
        CheckpointError: a dtype that safetensors does not have; names the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
            raise CheckpointError(f"{name} has the dtype {tensor.dtype}, which cannot be kept: use one of {kinds}")
    ordered = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    return {
        name: tensors[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name in ordered
    }


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file, without another copy.

    Args:
        tensors: as :func:`copies` makes them.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
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
        OSError, SafetensorError: it cannot be read.
    """
    # The library maps the file into memory. A copy stays what it is if the file goes.
    return {name: tensor.clone() for name, tensor in load_file(path).items()}
