"""The state of models in slices: put together for a checkpoint, and cut up again for any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.store import Snapshot
from unisono.train.model.prepared import Prepared, prefixed
from unisono.train.model.slices import cut_like, held_whole, is_sliced, whole_like
from unisono.train.state.state import VERSIONS


def whole_state(prepared: Prepared, snapshot: Snapshot) -> Snapshot:
    """A snapshot of this device's slices with all slices, on the CPU. Collective among the devices of a worker."""
    return _mapped(prepared, snapshot, lambda sliced, value: whole_like(sliced, value).cpu())


def sliced_state(prepared: Prepared, snapshot: Snapshot) -> Snapshot:
    """The inverse: a whole snapshot with this device's slices alone. What is of another model stays as it is."""
    return _mapped(prepared, snapshot, cut_like)


def _mapped(prepared: Prepared, snapshot: Snapshot, change: Callable[[Tensor, Tensor], Tensor]) -> Snapshot:
    held = {
        prefix + name: value
        for prefix, module in prefixed(prepared.modules)
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and is_sliced(value)
    }
    model = type(snapshot.model)(snapshot.model)
    for name, value in snapshot.model.items():
        model[name] = change(held[name], value) if name in held else value
    if (versions := getattr(snapshot.model, VERSIONS, None)) is not None:
        setattr(model, VERSIONS, versions)
    optimizers = [_optimizer(*pair, change) for pair in zip(prepared.optimizers, snapshot.optimizer, strict=False)]
    return replace(snapshot, model=model, optimizer=[*optimizers, *snapshot.optimizer[len(optimizers) :]])


def _optimizer(optimizer: Optimizer, kept: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def changed(number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        sliced = held_whole(parameters[number]) if number < len(parameters) else None
        return {
            name: change(sliced, value) if sliced is not None and _is_per_element(value) else value
            for name, value in values.items()
        }

    return {**kept, "state": {number: changed(number, values) for number, values in kept["state"].items()}}


def _is_per_element(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
