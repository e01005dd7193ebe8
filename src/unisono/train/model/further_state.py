"""Further state of a script that shards change, as ``run.prepare`` is given it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import ModelError
from unisono.received import short
from unisono.train.model.places import RULES, BufferPlace, ListedPlace
from unisono.train.model.tensors import version_of


def further_places(state: Mapping[str, Any]) -> list[BufferPlace]:
    """The places of further state, as ``run.prepare`` is given it.

    Args:
        state: the state by name: a tensor, ``(tensor, rule)``, or ``(object, {attribute: rule})``.

    Raises:
        ModelError: it is something else; says what it may be.
    """
    if not isinstance(state, Mapping):
        raise ModelError(f"run.prepare(state=…) is {short(state)}: give a dict, of the state by name")
    places: list[BufferPlace] = []
    for name, given in state.items():
        match given:
            case Tensor():
                places.append(_place({name: given}, name, f"state {name}", None, grows=False))
            case (Tensor() as tensor, rule):
                places.append(_place({name: tensor}, name, f"state {name}", rule, grows=False))
            case (thing, dict(attributes)):
                places += [
                    _place(_registry(thing, key, name), key, f"state {name}.{key}", attributes[key], grows=True)
                    for key in attributes
                ]
            case _:
                raise ModelError(
                    f"run.prepare(state=…): {name!r} is {short(given)}: give a tensor, (tensor, rule), or (object, "
                    f"{{attribute: rule}}), with a rule of {', '.join(RULES)}"
                )
    _require_apart(places)
    return places


def _registry(thing: Any, key: str, name: str) -> dict[str, Any]:
    """The dictionary of an object that holds an attribute."""
    registries: Sequence[dict[str, Any]] = [vars(thing)] if hasattr(thing, "__dict__") else []
    if isinstance(thing, nn.Module):
        registries = [*registries, thing._buffers, thing._parameters]
    for registry in registries:
        found = registry.get(key)
        if isinstance(found, Tensor) or (isinstance(found, list) and all(isinstance(one, Tensor) for one in found)):
            return registry
    raise ModelError(
        f"run.prepare(state=…): {name!r}, a {type(thing).__name__}, has no attribute {key} that holds a tensor, or a "
        f"list of tensors. Numbers of Python cannot be combined: keep them as a tensor"
    )


def _place(registry: dict[str, Any], key: str, name: str, rule: Any, *, grows: bool) -> BufferPlace:
    said = f"run.prepare(state=…): {name.removeprefix('state ')!r}"
    if rule is not None and rule not in RULES:
        raise ModelError(f"{said} has the rule {short(rule)}: there are {', '.join(RULES)}")
    if isinstance(registry[key], list):
        if rule != "cat":
            raise ModelError(f"{said} is a list of tensors, to which shards append: its rule can only be cat")
        return ListedPlace.of(registry, key, name)
    tensor = registry[key]
    version_of(tensor, said)
    if tensor.layout != torch.strided or _repeats(tensor):
        raise ModelError(f"{said} is sparse or expanded, so that it cannot be set to a value: give a dense copy of it")
    if tensor.requires_grad:
        raise ModelError(f"{said} requires a gradient: what is trained belongs to an optimizer; else detach it")
    if rule == "mean" and not tensor.is_floating_point():
        raise ModelError(f"{said} is of {tensor.dtype}, which has no mean: use first, sum, max or min, or a float")
    if rule == "cat" and not (grows and tensor.dim()):
        raise ModelError(
            f"{said} is to grow (cat), which only an attribute with a first dimension can: give (object, "
            f"{{attribute: 'cat'}}), and let shards assign torch.cat([object.attribute, new])"
        )
    return BufferPlace(registry, key, name, rule)


def _repeats(tensor: Tensor) -> bool:
    """Whether several of its elements are one place in memory."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _require_apart(places: Sequence[BufferPlace]) -> None:
    seen: dict[int, str] = {}
    if len({place.name for place in places}) < len(places):
        raise ModelError(f"run.prepare(state=…): two have one name: {', '.join(place.name for place in places)}")
    for place in places:
        if (other := seen.setdefault(id(place.tensor), place.name)) != place.name:
            raise ModelError(f"run.prepare(state=…): {other} and {place.name} are one tensor: give it once")
