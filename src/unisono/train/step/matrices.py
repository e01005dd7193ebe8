"""Matrices that are updated as a whole, and who owns which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from unisono.errors import ModelError
from unisono.plan.owners import owners_of
from unisono.received import short
from unisono.train.group.devices import Devices
from unisono.train.model.slices import held_whole
from unisono.train.model.whole_matrix import Cost, cost_of


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor that is updated as a whole.

    Attributes:
        number: its number among all of them.
        optimizer: the number of its optimizer.
        group: the number of its group there.
        parameter: what this device holds of it.
        shape: the shape of all of it.
        worker: the rank of the worker that owns it.
        device: the device of that worker.
    """

    number: int
    optimizer: int
    group: int
    parameter: Tensor
    shape: tuple[int, ...]
    worker: int
    device: int


Worked = dict[int, tuple[Tensor, dict[str, Any]]]
"""Of matrices, by number: the new value of what this device holds, and the new state."""


def matrices_of(optimizers: Sequence[Optimizer], crew: int, devices: Devices) -> list[Matrix]:
    """All matrices, each with its owner.

    Args:
        optimizers: all optimizers. Only some of them may update whole matrices.
        crew: the number of workers that share the work.
        devices: the devices of this worker, which share it, too, where matrices lie in slices.

    Raises:
        ModelError: a cost is no number, or cannot be one.
    """
    found, costs = [], []
    for number, optimizer in enumerate(optimizers):
        if (cost := cost_of(optimizer)) is None:
            continue
        for group, settings in enumerate(optimizer.param_groups):
            for parameter in settings["params"]:
                whole = held_whole(parameter)
                shape = tuple((parameter if whole is None else whole).shape)
                found.append((number, group, parameter, shape))
                costs.append(_checked_cost(optimizer, cost, shape))
    is_sliced = any(held_whole(parameter) is not None for _, _, parameter, _ in found)
    members = devices.count if is_sliced else 1
    owners = owners_of(costs, crew * members)
    return [
        Matrix(number, *each, worker=owner // members, device=owner % members)
        for number, (each, owner) in enumerate(zip(found, owners, strict=True))
    ]


def _checked_cost(optimizer: Optimizer, cost: Cost, shape: tuple[int, ...]) -> float:
    found: Any = cost(shape)  # a function of the user
    if isinstance(found, int | float) and found >= 0 and math.isfinite(found):
        return float(found)
    raise ModelError(
        f"unisono.whole_matrix({type(optimizer).__name__}, cost=…): a tensor of shape {shape} costs {short(found)}: "
        "let the function return a number from 0 up, the same on all workers"
    )
