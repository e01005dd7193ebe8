"""The state of models on several devices: put together for a checkpoint, and cut up again for any number of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.codec import flatten, unflatten
from unisono.checkpoint.snapshot import Snapshot
from unisono.checkpoint.tensor_bytes import Share, copied, empty_as, form_of
from unisono.received import value_of
from unisono.train.group.workers import Devices
from unisono.train.model.prepared import Prepared, prefixed
from unisono.train.model.slices import cut_like, held_whole, is_sliced, whole_like
from unisono.train.model.staging import Staging, groups_of
from unisono.train.state.model_state import VERSIONS


def sliced_share(prepared: Prepared, snapshot: Snapshot, devices: Devices) -> tuple[Snapshot, None, Share]:
    """A snapshot of what all devices of this worker hold, and which of it this one writes. Collective among them.

    No digests belong to it: the workers have agreed on slices.
    What other devices write is on the meta device. No device needs room for more than it writes, and one whole tensor.
    """
    whole = _Wholes(devices.rank, devices.count)
    changed = _mapped(prepared, snapshot, whole.place_of)
    share = Share(devices.rank, whole.copy, devices.mesh.writing.gather_json)
    return replace(changed, state=changed.state if devices.is_first else {}), None, share


def sliced_state(prepared: Prepared, snapshot: Snapshot) -> Snapshot:
    """Return this device's slices of a whole snapshot. The state of another model stays as it is."""
    return _mapped(prepared, snapshot, cut_like)


def _mapped(prepared: Prepared, snapshot: Snapshot, change: Callable[[Tensor, Tensor], Tensor]) -> Snapshot:
    held = {
        prefix + name: value
        for prefix, module in prefixed(prepared.modules)
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and is_sliced(value)
    }
    model, changed = dict(snapshot.model), dict[int, Tensor]()
    for name, value in snapshot.model.items():
        if (whole := held.get(name)) is not None:
            if id(whole) not in changed:  # tied weights are one
                changed[id(whole)] = change(whole, value)
            model[name] = changed[id(whole)]
    optimizers = [_optimizer(*pair, change) for pair in zip(prepared.optimizers, snapshot.optimizer, strict=False)]
    optimizers += snapshot.optimizer[len(optimizers) :]
    return replace(snapshot, model=_like(snapshot.model, model), optimizer=optimizers)


def _like(whole: dict[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of a model by name, with the notes of its state."""
    model = type(whole)(tensors)
    if (versions := getattr(whole, VERSIONS, None)) is not None:
        setattr(model, VERSIONS, versions)
    return model


def _optimizer(optimizer: Optimizer, kept: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    if not isinstance(kept, dict) or not isinstance(kept.get("state"), dict):
        return kept  # of no optimizer of torch's, and refused as such
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def changed(number: Any, values: Any) -> Any:
        if number not in range(len(parameters)) or not isinstance(values, dict):
            return values
        sliced = held_whole(parameters[number])
        return {
            name: change(sliced, value) if sliced is not None and is_per_element(value) else value
            for name, value in values.items()
        }

    return {**kept, "state": {number: changed(number, values) for number, values in kept["state"].items()}}


def is_per_element(value: Any) -> bool:
    """Whether what an optimizer keeps of a parameter is cut as that is."""
    return isinstance(value, Tensor) and value.dim() > 0


class _Wholes:
    """Tensors of which each device has a slice, each put together on the device that writes it."""

    def __init__(self, rank: int, count: int) -> None:
        self._rank, self._bytes = rank, [0] * count
        self._slices: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def place_of(self, held: Tensor, value: Tensor) -> Tensor:
        """Return the placeholder of a whole tensor, until the tensor is put together."""
        place = torch.empty(held.shape, dtype=value.dtype, device="meta")
        self._slices[id(place)] = place, held, value
        return place

    def copy(self, tensor: Tensor) -> Tensor | None:
        """A tensor as it is to be written here. What has no slices is written by the first device."""
        if id(tensor) not in self._slices:
            return copied(tensor) if self._rank == 0 else None
        _, held, value = self._slices[id(tensor)]
        owner = self._bytes.index(min(self._bytes))
        self._bytes[owner] += tensor.nbytes
        whole = whole_like(held, value)
        return copied(whole) if owner == self._rank else None


# Stages: each device has some tensors, and all of each.


SMALL = 2**10
"""Bytes of a tensor that all devices are told, and the first one writes."""


def staged_share(
    staging: Staging, prepared: Prepared, snapshot: Snapshot, devices: Devices
) -> tuple[Snapshot, None, Share]:
    """Return this device's share of a snapshot of a model in stages. Collective among the devices."""
    (module,) = prepared.modules
    own: dict[str, Any] = {
        "model": dict(snapshot.model),
        "transient": snapshot.state["transient"],
        "trained": dict.fromkeys(prepared.parameters),
    }
    pairs = list(zip(prepared.optimizers, snapshot.optimizer, strict=True))
    for number, (optimizer, kept) in enumerate(pairs):
        names = [name for group in groups_of(optimizer) for name in group if staging.owner(name) == devices.rank]
        own[f"optimizer {number}"] = {names[place]: values for place, values in kept["state"].items()}
    merged = {name: _merged(staging, values) for name, values in own.items()}
    tensors = merged["model"]
    model = _like(snapshot.model, {name: tensors[name] for name in module.state_dict() if name in tensors})
    is_first, rank = staging.places.rank == 0, staging.places.rank
    state = {
        **(snapshot.state if is_first else {}),
        "transient": merged["transient"],
        "trained": [name for name, _ in module.named_parameters() if name in merged["trained"]],
        "order": [[name for group in groups_of(optimizer) for name in group] for optimizer in prepared.optimizers],
    }
    optimizers = [
        _regrouped(kept, groups_of(optimizer), merged[f"optimizer {number}"])
        for number, (optimizer, kept) in enumerate(pairs)
    ]
    ours = {
        tensor.data_ptr() for values in own.values() for tensor in flatten(values)[1].values() if not _is_small(tensor)
    }

    def copy(tensor: Tensor) -> Tensor | None:
        is_here = not tensor.is_meta and (rank == 0 or tensor.data_ptr() in ours)
        return copied(tensor) if is_here else None

    share = Share(devices.rank, copy, devices.mesh.writing.gather_json)
    return replace(snapshot, model=model, optimizer=optimizers, state=state), None, share


def _merged(staging: Staging, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name of all devices together; large tensors of other devices on the meta device. Collective."""
    skeleton, tensors = flatten(values)
    small = {name: tensor for name, tensor in tensors.items() if _is_small(tensor)}
    forms = {name: form_of(tensor) for name, tensor in tensors.items() if name not in small}
    merged: dict[str, Any] = {}
    for device, reply in enumerate(staging.values_of_devices([skeleton, forms, small])):
        if device == staging.places.rank:
            merged |= values
            continue
        skeleton, forms, small = value_of(_Reply, reply, "the reply of a device about its stages")
        hollow = {name: empty_as(form, "meta") for name, form in forms.items()}
        merged |= value_of(dict[str, Any], unflatten(skeleton, hollow | small), "the state of a stage")
    return merged


_Reply = tuple[Any, dict[str, Any], dict[str, Tensor]]


def _is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= SMALL or (tensor.dtype == torch.uint8 and tensor.dim() == 1)  # the bytes of an array


def staged_state(staging: Staging, prepared: Prepared, snapshot: Snapshot) -> Snapshot:
    """Return this device's stages of a whole snapshot. The state of another model stays as it is."""
    (module,) = prepared.modules
    hollow = {name for name, value in module.state_dict().items() if isinstance(value, Tensor) and value.is_meta}
    places = {place.name for place in prepared.buffers}

    def is_here(name: str) -> bool:
        return not staging.has_module_of(name) or staging.owner(name) == staging.places.rank

    model = _like(snapshot.model, {name: value for name, value in snapshot.model.items() if name not in hollow})
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
