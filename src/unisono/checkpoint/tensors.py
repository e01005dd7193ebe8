"""Tensors as a safetensors file, piece by piece.

Written here rather than by the library, whose writer hides the system's error number, leaves files that only their
owner can read, and in older releases copies everything once more. It is the library that reads them.
"""

from __future__ import annotations

import json
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

from unisono.checkpoint.layout import KEPT, require_values
from unisono.device import is_accelerator, sent_to
from unisono.errors import CheckpointError, Superseded
from unisono.received import parse_json, short

T = TypeVar("T")


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that lies row by row, as safetensors wants it; from an accelerator it is under way yet."""
    if is_accelerator(tensor.device):
        return sent_to(torch.device("cpu"), tensor.detach().contiguous())
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Share:
    """This process's share of a checkpoint. Its tensors are whole, and each is written by one process.

    Attributes:
        number: the number of the process. The first one, 0, has the last word: it writes what is no tensor, says which
            files there are, and puts the checkpoint in its place.
        copy: a function that makes what is written here of a tensor; None for what another process writes. Called by
            all, in the same order.
        gather: a function that gives the JSON value of each process, in their order.
    """

    number: int = 0
    copy: Callable[[Tensor], Tensor | None] = copied
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    @property
    def is_first(self) -> bool:
        """Whether this process has the last word."""
        return self.number == 0

    def together(self, act: Callable[[], T]) -> list[T]:
        """Do something on all processes; returns what came of it on each, as JSON values.

        Raises:
            CheckpointError: one of them could not; says which, and why.
            OSError: this one could not.
            Superseded: the job goes on without this worker.
        """
        made: T | None = None
        failed: CheckpointError | OSError | Superseded | None = None
        try:
            made = act()
        except (CheckpointError, OSError, Superseded) as error:
            failed = error
        told = self.gather([made, "" if failed is None else str(failed) or type(failed).__name__])
        if failed is not None:
            raise failed
        for number, each in enumerate(told):
            match each:
                case [_, ""]:
                    continue
                case [_, str(why)]:
                    raise CheckpointError(f"device {number} of its worker: {why}")
            raise CheckpointError(f"device {number} of its worker says {short(each)}")
        return [each for each, _ in told]


WHOLE = Share()
"""All of it, by this process alone."""


def require_each_once(names: Sequence[str], written: Sequence[Sequence[str]], part: str) -> None:
    """Refuse a checkpoint in which a tensor is missing, or is there twice.

    Args:
        names: the names of the tensors that a part of it has.
        written: those that each process has written.
        part: what they are of.

    Raises:
        CheckpointError: names one.
    """
    counts = Counter(chain.from_iterable(written))
    if odd := next((name for name in names if counts[name] != 1), ""):
        raise CheckpointError(f"{odd} of its {part} was written by {counts[odd]} devices of its worker, and not by one")


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
