"""Parameters and buffers that several modules share (tied weights), and what keeps them tied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from unisono.errors import ModelError


class Ties:
    """The parameters and buffers that have several places in models, as they are now."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        places: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for full, module, key, tensor in _places(roots):
            places.setdefault(id(tensor), []).append((full, module, key))
        self._places = [same for same in places.values() if len(same) > 1]

    def restore(self) -> None:
        """Put the tensor of the first place into all others, where both tensors are on a device or both on none."""
        for (_, module, name), *others in self._places:
            first = _own(module)[name]
            for _, other, key in others:
                held: dict[str, Any] = other._parameters if key in other._parameters else other._buffers
                if first.is_meta == held[key].is_meta:
                    held[key] = first

    def require_same_parts(self, plan: Mapping[str, Any]) -> None:
        """Refuse a plan of tensor parallelism that cuts one tensor in two ways.

        Raises:
            ModelError: the plan does so; names both places.
        """
        for places in self._places:
            ways = {_part_of(full.rpartition(".")[0], module, plan): full for full, module, _ in places}
            if len(ways) > 1:
                first, second, *_ = ways.values()
                raise ModelError(
                    f"run.parallelize: {first} and {second} are one parameter (tied weights), and the plan cuts them "
                    f"in different ways: have both cut alike, such as an embedding by RowwiseParallel() and a layer by "
                    f"ColwiseParallel(); leave both out; or untie them"
                )


def _places(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for root in roots:
        for name, module in root.named_modules():
            for key, tensor in _own(module).items():
                yield f"{name}.{key}".lstrip("."), module, key, tensor


def _own(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


def _part_of(name: str, module: nn.Module, plan: Mapping[str, Any]) -> Any:
    """How a plan cuts the weight of a module: whether by rows, or the name of the style; None if it does not."""
    path = name.split(".")
    for pattern, style in plan.items():
        wanted = pattern.split(".")
        if len(wanted) == len(path) and all(map(fnmatchcase, path, wanted)):
            kind = type(style).__name__
            cuts_rows = {"ColwiseParallel": True, "RowwiseParallel": False}.get(kind)
            return kind if cuts_rows is None else cuts_rows != isinstance(module, nn.Embedding)
    return None


# Modules and parameters of the units that run.fully_shard makes.

_unit_of: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()


def take(roots: Sequence[nn.Module]) -> None:
    """Note that modules are one unit, with all modules in them that belong to none. May be called again for a unit.

    Raises:
        ModelError: one of their parameters also belongs to another unit, which would gather it as a separate one; names
            both places.
    """
    unit = _unit_of.get(roots[0], object())
    places = [place for place in _places(roots) if place[2] in place[1]._parameters]
    others = {
        id(parameter): (other_unit, full)
        for full, module, _, parameter in places
        if (other_unit := _unit_of.get(module, unit)) is not unit
    }
    own = [(full, parameter) for full, module, _, parameter in places if _unit_of.get(module, unit) is unit]
    for full, parameter in own:
        owner, first = others.get(id(parameter), getattr(parameter, "_unit", (unit, full)))
        if owner is not unit:
            raise ModelError(
                f"run.fully_shard: {first} of an earlier call and {full} are one parameter (tied weights), and each "
                f"call gathers its parameters by itself: give both modules to one call, run.fully_shard([a, b]), or "
                f"call it for neither of them, so that the call for the module around them takes both"
            )
    for full, parameter in own:
        # An attribute, since torch moves no parameter of which there is a weak reference.
        parameter._unit = unit, full  # type: ignore[attr-defined]
    for root in roots:
        for module in root.modules():
            _unit_of.setdefault(module, unit)
