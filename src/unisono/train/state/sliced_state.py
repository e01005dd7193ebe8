"""The state of models on several devices: put together for a checkpoint, and cut up again for any number of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from unisono.checkpoint.store import Snapshot
from unisono.train.model.prepared import Prepared, prefixed
from unisono.train.model.slices import cut_like, held_whole, is_sliced, whole_like
from unisono.train.model.stage_optimizers import groups_of
from unisono.train.model.staging import Staging, staging_of
from unisono.train.state.state import VERSIONS


def whole_state(prepared: Prepared, snapshot: Snapshot) -> Snapshot:
    """A snapshot of what this device holds with all that others hold, on the CPU. Collective among the devices."""
    if (staging := staging_of(prepared.modules)) is not None:
        return _joined(staging, prepared, snapshot)
    return _mapped(prepared, snapshot, lambda sliced, value: whole_like(sliced, value).cpu())


def sliced_state(prepared: Prepared, snapshot: Snapshot) -> Snapshot:
    """The inverse: a whole snapshot with what this device holds. What is of another model stays as it is."""
    if (staging := staging_of(prepared.modules)) is not None:
        return _own(staging, prepared, snapshot)
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


# Stages: each device has some tensors, and all of each.


def _joined(staging: Staging, prepared: Prepared, snapshot: Snapshot) -> Snapshot:
    (module,) = prepared.modules
    own: dict[str, Any] = {
        "model": dict(snapshot.model),
        "transient": snapshot.state["transient"],
        "trained": dict.fromkeys(prepared.parameters),
    }
    pairs = list(zip(prepared.optimizers, snapshot.optimizer, strict=True))
    for number, (optimizer, kept) in enumerate(pairs):
        names = _own_names(staging, optimizer)
        own[f"optimizer {number}"] = {names[place]: values for place, values in kept["state"].items()}
    found = {name: staging.merged(_on_cpu(values)) for name, values in own.items()}
    model = type(snapshot.model)((name, found["model"][name]) for name in module.state_dict() if name in found["model"])
    setattr(model, VERSIONS, getattr(snapshot.model, VERSIONS, {}))
    state = {
        **snapshot.state,
        "transient": found["transient"],
        "trained": [name for name, _ in module.named_parameters() if name in found["trained"]],
        "order": [[name for group in groups_of(one) for name in group] for one in prepared.optimizers],
    }
    optimizers = [
        _regrouped(kept, groups_of(optimizer), found[f"optimizer {number}"])
        for number, (optimizer, kept) in enumerate(pairs)
    ]
    return replace(snapshot, model=model, optimizer=optimizers, state=state)


def _own(staging: Staging, prepared: Prepared, snapshot: Snapshot) -> Snapshot:
    (module,) = prepared.modules
    hollow = {name for name, value in module.state_dict().items() if isinstance(value, Tensor) and value.is_meta}
    places = {place.name for place in prepared.buffers}

    def is_here(name: str) -> bool:
        return not staging.knows(name) or staging.owner(name) == staging.placement.rank

    model = type(snapshot.model)((name, value) for name, value in snapshot.model.items() if name not in hollow)
    setattr(model, VERSIONS, getattr(snapshot.model, VERSIONS, {}))
    optimizers = [
        _cut_groups(kept, groups_of(optimizer), is_here)
        for optimizer, kept in zip(prepared.optimizers, snapshot.optimizer, strict=False)
    ]
    state = {
        **snapshot.state,
        "transient": {name: value for name, value in snapshot.state["transient"].items() if name in places},
        "trained": [name for name in snapshot.state["trained"] if is_here(name)],
        "order": [[name for name in names if is_here(name)] for names in snapshot.state["order"]],
    }
    return replace(snapshot, model=model, optimizer=[*optimizers, *snapshot.optimizer[len(optimizers) :]], state=state)


def _own_names(staging: Staging, optimizer: Optimizer) -> list[str]:
    rank = staging.placement.rank
    return [name for group in groups_of(optimizer) for name in group if staging.owner(name) == rank]


def _on_cpu(values: Any) -> Any:
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, Tensor) else value, values)


def _regrouped(kept: Any, groups: Sequence[Sequence[str]], by_name: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state, whose parameters are numbered through the groups."""
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    return {
        "state": {numbers[name]: by_name[name] for name in numbers if name in by_name},
        "param_groups": [
            {**group, "params": [numbers[name] for name in names]}
            for group, names in zip(kept["param_groups"], groups, strict=True)
        ],
    }


def _cut_groups(kept: Any, groups: Sequence[Sequence[str]], is_here: Callable[[str], bool]) -> Any:
    if [len(group["params"]) for group in kept["param_groups"]] != [len(names) for names in groups]:
        return kept  # of another optimizer, which refuses it
    names = [name for group in groups for name in group]
    by_name = {names[number]: values for number, values in kept["state"].items()}
    own = [[name for name in group if is_here(name)] for group in groups]
    return _regrouped(kept, own, {name: values for name, values in by_name.items() if is_here(name)})
