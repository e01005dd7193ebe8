"""The update: what optimizers do with the step's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# What an optimizer goes by, as it is told to another worker.

UNKNOWN = object()
"""Stands for what is no JSON value."""


def hyperparameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's as JSON values by name: numbers, switches, texts, and lists of them. What is none, is left out."""
    groups = [{name: _plain(group[name]) for name in group if name != "params"} for group in _groups(optimizer)]
    return [{name: value for name, value in group.items() if value is not UNKNOWN} for group in groups]


def settings_digest(optimizers: Sequence[Optimizer]) -> int:
    """A number of 32 bits for their hyperparameters."""
    return crc32(repr([*map(hyperparameters_of, optimizers)]).encode())


def set_hyperparameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """The inverse of :func:`hyperparameters_of`, for an optimizer with the same groups."""
    for group, values in zip(_groups(optimizer), groups, strict=True):
        group.update({name: _like(group.get(name), value) for name, value in values.items()})


SCHEDULED = {"initial_lr": ("lr",), "base_momentum": ("momentum", "betas")}
"""What a schedule changes from step to step, by what it then notes in the group."""


def replaced_hyperparameters(
    optimizer: Optimizer, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Those that are other ones now, each with what it was; without those that a schedule changes anyway.

    Args:
        optimizer: the optimizer.
        before: its hyperparameters, group by group.
        after: the same, later.
    """
    told = []
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        scheduled = {name for mark, names in SCHEDULED.items() if mark in old for name in names}
        differ = [name for name in old if name in new and name not in scheduled and old[name] != new[name]]
        if differ:
            where = f"{type(optimizer).__name__}{f' group {number}' if len(before) > 1 else ''}"
            told.append(f"{where} {', '.join(f'{name} {new[name]} (not {old[name]})' for name in differ)}")
    return told


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


READERS: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
)
"""Optimizers that go element by element, and read gradients without changing them."""


class UpdateWatch:
    """A hook on the steps of optimizers that is told of each, and leaves the gradients alone.

    Args:
        told: a function that gets the optimizer.
    """

    def __init__(self, told: Callable[[Optimizer], None]) -> None:
        self._told = told

    def __call__(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """What torch calls before the step."""
        self._told(optimizer)


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether the script has put another function in place of this optimizer's ``step``. Schedulers wrap it only."""
    step: Any = vars(optimizer).get("step", type(optimizer).step)
    while getattr(step, "__globals__", {}).get("__name__") == optim.lr_scheduler.__name__:
        step = step.__wrapped__
    return step is not type(optimizer).step


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether a function of the script's is called before or behind each step of this optimizer."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(not isinstance(hook, UpdateWatch) for each in hooks for hook in each.values())


def may_change_gradients(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer, or a hook of it, might change gradients in place."""
    is_reader = type(optimizer) in READERS and not any(map(_adds_momentum_in_place, optimizer.param_groups))
    return not is_reader or is_hooked(optimizer)


def _adds_momentum_in_place(group: Mapping[str, Any]) -> bool:
    """Whether SGD keeps Nesterov's step in the gradients, as torch does where it updates many tensors at once."""
    if not group.get("nesterov"):
        return False
    at_once = group.get("foreach")
    if at_once is None and not group.get("fused"):  # torch chooses, by the device
        at_once = any(parameter.device.type != "cpu" for parameter in group["params"])
    return bool(at_once)


def tell_schedulers(optimizers: Sequence[Optimizer]) -> None:
    """Their updates are made elsewhere: without this, learning-rate schedulers warn that there was none."""
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]


class Update:
    """Every worker updates all parameters."""

    def work_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Work out together what can be before anything changes: nothing. Collective."""

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Run the optimizers."""
        for optimizer in optimizers:
            optimizer.step()
