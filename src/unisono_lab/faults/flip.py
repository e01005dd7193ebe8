"""Flipped bits, as a fault of the memory makes them: nobody is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.errors import JobError
from unisono.train.model.at_rest import kept_by
from unisono_lab.faults.faults import FlippedPlace

if TYPE_CHECKING:
    from unisono.train.run import Run


def flip_in(run: Run, place: FlippedPlace, bit: int) -> None:
    """Flip a bit of the largest number of the first tensor that there is in this worker's memory.

    Raises:
        JobError: there is none.
    """
    tensors = [tensor for tensor in tensors_in(run, place) if tensor.numel() > 1]
    if not tensors:
        raise JobError(f"flip_bit: this worker holds no {place}")
    values = numbers_of(tensors[0])
    flip(values, int(values.double().abs().nan_to_num().argmax()), bit)


def flip_in_checkpoint(run: Run, bit: int) -> None:
    """Flip a bit of the weights' file of the newest checkpoint in the run folder.

    Raises:
        JobError: there is none.
    """
    if run.inside.checkpoints.store is not None:
        run.inside.checkpoints.store.wait()  # for the one that is being written
    newest = max(run.inside.folder.checkpoints.glob("step-*[0-9]/model.safetensors"), default=None)
    if newest is None:
        raise JobError(
            "flip_bit: there is no checkpoint yet: set checkpoints={'every': …}, or flip the bit at a later step"
        )
    flip_in_file(newest, bit)


def flip_in_file(path: Path, bit: int) -> None:
    """Flip a bit of a file that is not empty, from its begin on, modulo its length."""
    data = bytearray(path.read_bytes())
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def tensors_in(run: Run, place: FlippedPlace) -> Sequence[Tensor]:
    """What this worker holds there now."""
    prepared = run.inside.trained.require_prepared()
    match place:
        case "weights":
            return [*prepared.parameters.values()]
        case "buffers":
            return [one.tensor for one in prepared.buffers]
        case "optimizer":
            return kept_by(prepared.optimizers)
        case _:
            raise JobError(f"flip_bit: {place} is nothing that a worker holds between two steps")


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit, past everything that counts writes.

    Args:
        tensor: a dense tensor on the CPU.
        element: the number of the element, in the order of memory.
        bit: the number of the bit, from the lowest on, modulo the element's width.
    """
    values = numbers_of(tensor)
    bit %= 8 * values.itemsize
    values.view(torch.uint8).numpy()[element * values.itemsize + bit // 8] ^= 1 << bit % 8


def numbers_of(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of memory, with a count of writes of its own."""
    return tensor.data.as_strided((tensor.numel(),), (1,))
