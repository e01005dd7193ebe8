"""Tensors and arrays as bytes: the closed lists of dtypes that bytes may become, and the content of safetensors files.

The files are written here rather than by the library, whose writer hides the system's error number, makes files that
only their owner can read, and in older releases copies everything once more. The library reads them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from warnings import catch_warnings, filterwarnings

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from unisono.device import is_accelerator, sent_to
from unisono.errors import CheckpointError, Superseded
from unisono.received import memory, parse_json, short

T = TypeVar("T")

KEPT = {
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
"""The dtypes of tensors, and their names in a safetensors file."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""All dtypes by their names in torch."""

_ON_THE_WIRE = {*KEPT, torch.complex32, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}

_NUMPY = re.compile(
    r"\|b1|\|[iu]1|[<>](?:[iu][248]|f(?:2|4|8|16)|c(?:8|16|32))"
    r"|[<>][mM]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|\|S[1-9][0-9]{0,8}|[<>]U[1-9][0-9]{0,8}"
)
"""The dtypes of numbers, times, bytes and text, whose values hold no pointers: any bytes can safely become them."""

_MOST_DIMENSIONS = 64
_LARGEST_SIZE = 2**63 - 1
_LAST_CHARACTER = 0x10FFFF


def is_kept(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this dtype can be kept: their bytes and ``dtype.str`` determine them."""
    return dtype.names is None and _NUMPY.fullmatch(dtype.str) is not None


def numpy_dtype(name: Any) -> np.dtype[Any]:
    """A dtype by its ``dtype.str``.

    Raises:
        CheckpointError: it is none of those that are kept.
    """
    if not isinstance(name, str) or _NUMPY.fullmatch(name) is None:
        raise CheckpointError(f"{short(name)} is no dtype of an array that can be kept")
    try:
        return np.dtype(name)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is no dtype of an array on this machine") from error


def torch_dtype(name: Any) -> torch.dtype:
    """A dtype of tensors that workers send to each other, by its name in torch.

    Raises:
        CheckpointError: there is no such dtype, or workers do not send it.
    """
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype not in _ON_THE_WIRE:
        raise CheckpointError(f"{short(name)} is no dtype of a tensor")
    return dtype


def sizes(value: Any) -> list[int]:
    """A shape, or strides.

    Raises:
        CheckpointError: it is no list of numbers from 0.
    """
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{short(value)} is no list of at most {_MOST_DIMENSIONS} sizes")
    for size in value:
        if type(size) is not int or not 0 <= size <= _LARGEST_SIZE:
            raise CheckpointError(f"{short(size)} is no size")
    return value


def bytes_of(shape: Sequence[int], itemsize: int) -> int:
    """Return the number of bytes of the elements.

    Raises:
        CheckpointError: more than this host has memory.
    """
    needed = math.prod(shape) * itemsize
    # An empty tensor needs no memory, but torch and NumPy multiply its other sizes, in 64 bits.
    if needed > memory() or math.prod(size for size in shape if size) * itemsize > _LARGEST_SIZE:
        raise CheckpointError(f"a shape of {short(list(shape))} needs more memory than this host has")
    return needed


def form_of(tensor: Tensor) -> list[Any]:
    """The dtype and the shape of a tensor, as JSON values."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def empty_as(form: Any, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor of a dtype and shape, as :func:`form_of` gives them.

    Raises:
        CheckpointError: no tensor has this form, or this host has no memory for it.
    """
    match form:
        case [name, shape]:
            dtype = torch_dtype(name)
            bytes_of(sizes(shape), dtype.itemsize)
            try:
                return torch.empty(shape, dtype=dtype, device=device)
            except RuntimeError as error:
                raise CheckpointError(f"there is no room for {dtype} of the shape {short(shape)}: {error}") from error
    raise CheckpointError(f"{short(form)} is no dtype with a shape")


def require_dense(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Refuse strides with which elements would overlap, or have gaps between them.

    Raises:
        CheckpointError: the strides are not dense.
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != expected and 0 not in shape:
            raise CheckpointError(f"strides of {list(strides)} do not belong to a shape of {list(shape)}")
        expected *= size


def require_values(tensor: Tensor) -> Tensor:
    """Refuse a tensor of bool in which a byte is neither 0 nor 1, since operations of torch on it are undefined.

    Raises:
        CheckpointError: there is such a byte.
    """
    if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise CheckpointError("a tensor of bool holds values that are neither true nor false")
    return tensor


def array_of(data: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """A view of bytes as an array.

    Raises:
        CheckpointError: not every element is a value of the dtype.
    """
    if dtype.kind == "b" and data.size and data.max() > 1:
        raise CheckpointError("an array of bool holds values that are neither true nor false")
    if dtype.kind == "U" and data.size and data.view(f"{dtype.str[0]}u4").max() > _LAST_CHARACTER:
        raise CheckpointError("an array of text holds numbers that stand for no character")
    return data.view(dtype).reshape(shape)


# A checkpoint's tensors, and the process that writes each.


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, as safetensors needs it. From an accelerator the copy is asynchronous."""
    if is_accelerator(tensor.device):
        return sent_to(torch.device("cpu"), tensor.detach().contiguous())
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Share:
    """This process's share of a checkpoint. Its tensors are whole, and each is written by one process.

    Attributes:
        number: the number of the process. The first one, 0, also writes all that is no tensor, and the manifest, and
            gives the checkpoint its name.
        copy: a function that returns the copy of a tensor to write here; None for a tensor that another process writes.
            It is a collective call.
        gather: a function that returns the JSON values of all processes, in their order.
    """

    number: int = 0
    copy: Callable[[Tensor], Tensor | None] = copied
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the processes."""
        return self.number == 0

    def together(self, act: Callable[[], T]) -> list[T]:
        """Call a function on all processes; return the result of each process, as JSON values.

        Raises:
            CheckpointError: the function has failed on another process; says on which, and why.
            OSError: the function has raised it here.
            Superseded: the job goes on without this worker.
        """
        result: T | None = None
        failure: CheckpointError | OSError | Superseded | None = None
        try:
            result = act()
        except (CheckpointError, OSError, Superseded) as error:
            failure = error
        replies = self.gather([result, "" if failure is None else str(failure) or type(failure).__name__])
        if failure is not None:
            raise failure
        for number, reply in enumerate(replies):
            match reply:
                case [_, ""]:
                    continue
                case [_, str(why)]:
                    raise CheckpointError(f"device {number} of its worker: {why}")
            raise CheckpointError(f"device {number} of its worker says {short(reply)}")
        return [result for result, _ in replies]


WHOLE = Share()
"""The whole state, written by this process alone."""


def require_each_once(names: Sequence[str], written: Sequence[Sequence[str]], part: str) -> None:
    """Refuse a checkpoint in which a tensor is missing, or was written twice.

    Raises:
        CheckpointError: names one.
    """
    counts = Counter(chain.from_iterable(written))
    if wrong := next((name for name in names if counts[name] != 1), ""):
        raise CheckpointError(f"{wrong} of its {part} was written by {counts[wrong]} devices of its worker, not by one")


def copies(tensors: Mapping[str, Tensor], copy: Callable[[Tensor], Tensor | None] = copied) -> dict[str, Tensor]:
    """Contiguous copies on the CPU, those with the largest elements first, as safetensors needs them for alignment.

    Raises:
        CheckpointError: a dtype that safetensors does not have; names the tensor.
    """
    require_kept(tensors)
    ordered = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    return {name: copied_tensor for name in ordered if (copied_tensor := copy(tensors[name])) is not None}


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
    """The content of a safetensors file in pieces, of which the tensors are no copies."""
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
    # Copies do not change if the file is removed or overwritten.
    return {name: tensor.clone() for name, tensor in mapped_tensors(path).items()}


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped into memory read-only.

    The system can free their pages at any time. The file must not change while they are used.

    Raises:
        CheckpointError: it cannot be read; says why.
    """
    return _load_checked(path.name, lambda: _map(path))


def tensors_of(data: bytes) -> dict[str, Tensor]:
    """The tensors in the content of a safetensors file.

    Raises:
        CheckpointError: the bytes are no such content; says why.
    """
    return _load_checked("what should be tensors", lambda: load(data))


DAMAGE = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)
"""The errors that a file of another kind raises when it is read."""


def _load_checked(source: str, load: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        tensors = load()
    except DAMAGE as error:
        raise CheckpointError(f"{source} cannot be read: {type(error).__name__}: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in KEPT:
            raise CheckpointError(f"{source} cannot be read: {short(name)} has the dtype {tensor.dtype}")
        require_values(tensor)
    return tensors


_DTYPE_OF = {name: dtype for dtype, name in KEPT.items()}


def _map(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "np") as file:  # checks the header, and that the tensors fill the file
        names = file.keys()
    with catch_warnings():
        filterwarnings("ignore", message=".*not writable")
        # Not by the library, which maps the file privately, so that the system counts it as memory of this process.
        data = torch.from_numpy(np.memmap(path, np.uint8, "r"))
    begin = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    header = parse_json(data[8:begin].numpy().tobytes())
    return {name: _tensor(data[begin:], **header[name]) for name in names}


def _tensor(data: Tensor, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    if dtype not in _DTYPE_OF:
        raise ValueError(f"a tensor has the dtype {dtype}")
    piece = data[slice(*data_offsets)]
    is_aligned = piece.storage_offset() % _DTYPE_OF[dtype].itemsize == 0
    return (piece if is_aligned else piece.clone()).view(_DTYPE_OF[dtype]).reshape(shape)
