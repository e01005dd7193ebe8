"""Pieces of work of an update, each of which its owner does for all workers; and the bytes in which tensors travel."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.tensor_bytes import bytes_of, empty_as, form_of, require_values, sizes, torch_dtype
from unisono.errors import Unreadable
from unisono.plan.split import owners_of
from unisono.train.group.workers import Workers
from unisono.train.model.shared_work import Piece, SharingOptimizer
from unisono.train.step.part import Attempt, Part

# Tensors as rows of bytes, and values of which only a digest is sent once all members know them.

ALIGNMENT = 64
"""Each tensor of a row begins at a multiple of this number of bytes."""

MOST_VALUES = 64
"""The largest number of values that are remembered; with more, all are forgotten."""

Form = tuple[str, list[int]]
"""Dtype and shape of a tensor, as :func:`~unisono.checkpoint.tensor_bytes.form_of` returns them."""


def size_of(forms: Sequence[Form]) -> int:
    """The number of bytes of a row of tensors.

    Raises:
        CheckpointError: no tensors have these forms.
    """
    return sum(_padded(bytes_of(sizes(shape), torch_dtype(name).itemsize)) for name, shape in forms)


def row_of(tensors: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    """Tensors as bytes, one behind the other: a uint8 tensor of one dimension with ``size`` elements."""
    row, start = torch.zeros(size, dtype=torch.uint8, device=device), 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        row[start : start + data.numel()] = data
        start += _padded(data.numel())
    return row


def tensors_in(row: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """The tensors of a row that :func:`row_of` has made, as views of it.

    Raises:
        CheckpointError: no tensors have these forms, or a bool is neither 0 nor 1.
        Unreadable: the row is too short.
    """
    if size_of(forms) > row.numel():
        raise Unreadable(f"tensors of {size_of(forms)} bytes were announced, and {row.numel()} have come")
    tensors, start = [], 0
    for name, shape in forms:
        dtype = torch_dtype(name)
        length = math.prod(shape) * dtype.itemsize
        if not length:
            tensors.append(empty_as([name, shape], row.device))
            continue
        tensors.append(require_values(row[start : start + length].view(dtype).view(shape)))
        start += _padded(length)
    return tensors


def form(tensor: Tensor) -> Form:
    """The form of a tensor."""
    name, shape = form_of(tensor)
    return name, shape


def forms_of(tensors: Sequence[Tensor]) -> list[Form]:
    """The forms of tensors."""
    return [form(tensor) for tensor in tensors]


class Announcements:
    """Exchanges JSON values that members send again and again, mostly without a change.

    Args:
        gather: a function that returns every member's JSON value, in the order of ranks. Collective.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather = gather
        self._values: dict[str, Any] = {}  # the same on all members

    def exchange(self, own: Any) -> list[Any]:
        """Every member's value, in the order of ranks. Whole values are sent only if one of them is new. Collective."""
        keys = self._gather(_key(own))
        if any(key not in self._values for key in keys):
            if len(self._values) > MOST_VALUES:
                self._values.clear()
            self._values |= {_key(value): value for value in self._gather(own)}
        if any(key not in self._values for key in keys):
            raise Unreadable("a value from another worker does not match its digest: the memory of a host is faulty")
        return [self._values[key] for key in keys]


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


# Pieces of work of an update, each of which its owner does for all workers.


class SharedPieces(Part):
    """Has the owner of each piece of work do it before anything changes, and sends all workers the results.

    Args:
        least: the number of multiplications in a step from which on sharing is worth its messages.
    """

    def __init__(self, workers: Workers, least: float) -> None:
        self._workers, self._least = workers, least
        self._results: dict[int, dict[int, Piece]] = {}

    @torch.no_grad()
    def work_out(self, attempt: Attempt) -> None:
        """Work out all pieces of the next step of the optimizers. Collective; changes nothing."""
        self._results = {}
        for number, optimizer in enumerate(attempt.call.optimizers if attempt.call.update is None else ()):
            if isinstance(optimizer, SharingOptimizer) and self._is_worth(costs := optimizer.pieces()):
                self._results[number] = self._exchanged(optimizer, owners_of(costs, self._workers.world_size))

    def apply(self, attempt: Attempt) -> None:
        """Give the optimizers the results, for the step that follows."""
        for number, optimizer in enumerate(attempt.call.optimizers if attempt.call.update is None else ()):
            if isinstance(optimizer, SharingOptimizer):
                optimizer.given = self._results.pop(number, {})

    def _is_worth(self, costs: Sequence[float]) -> bool:
        return self._workers.world_size > 1 and bool(costs) and sum(costs) >= self._least

    def _exchanged(self, optimizer: SharingOptimizer, owners: Sequence[int]) -> dict[int, Piece]:
        rank, ranks = self._workers.rank, range(self._workers.world_size)
        owned = [[piece for piece, owner in enumerate(owners) if owner == peer] for peer in ranks]
        # All workers know all forms, so that none has to be sent.
        forms = [[forms_of(optimizer.forms(piece)) for piece in pieces] for pieces in owned]
        size = max(sum(map(size_of, piece_forms)) for piece_forms in forms)
        own = {piece: optimizer.worked_out(piece) for piece in owned[rank]}
        device = next((tensor.device for result in own.values() for tensor in result), torch.device("cpu"))
        rows = self._workers.transport.all_gather(
            row_of([tensor for piece in own.values() for tensor in piece], size, device)
        )
        results = dict(own)
        for peer in ranks:
            if peer == rank:
                continue
            tensors = iter(tensors_in(rows[peer], [form for piece_forms in forms[peer] for form in piece_forms]))
            for piece, piece_forms in zip(owned[peer], forms[peer], strict=True):
                results[piece] = [next(tensors).clone() for _ in piece_forms]  # a view would keep all rows in memory
        return results
