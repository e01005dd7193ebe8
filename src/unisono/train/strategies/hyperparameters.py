"""What an optimizer goes by, as it is told to another worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

UNKNOWN = object()
"""Stands for what is no JSON value."""


def hyperparameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's as JSON values by name: numbers, switches, texts, and lists of them. What is none, is left out."""
    groups = [{name: _plain(group[name]) for name in group if name != "params"} for group in _groups(optimizer)]
    return [{name: value for name, value in group.items() if value is not UNKNOWN} for group in groups]


def set_hyperparameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """The inverse of :func:`hyperparameters_of`, for an optimizer with the same groups."""
    for group, values in zip(_groups(optimizer), groups, strict=True):
        group.update({name: _like(group.get(name), value) for name, value in values.items()})


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return optimizer.param_groups


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        case Tensor() if value.numel() == 1:
            return value.item()
        case Integral():
            return int(value)
        case Real():  # also numpy's
            return float(value)
        case list() | tuple():
            values = [_plain(each) for each in value]
            return UNKNOWN if UNKNOWN in values else values
    return UNKNOWN


def _like(known: Any, value: Any) -> Any:
    if isinstance(known, Tensor) and isinstance(value, int | float):
        return torch.full_like(known, value)
    return tuple(value) if isinstance(known, tuple) and isinstance(value, list) else value
