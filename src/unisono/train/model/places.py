"""Where tensors are that shards change: buffers of modules, and further state of the script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

from unisono.checkpoint.layout import form_of
from unisono.errors import ModelError
from unisono.received import short

Rule = Literal["mean", "first", "sum", "max", "cat"]
"""What becomes of a tensor that each shard has changed by itself."""

RULES: tuple[str, ...] = get_args(Rule)

FRESH = ("sum", "cat")
"""Rules by which each shard begins with nothing, and what all of them make is added to what was there."""


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """The place that holds a buffer, or another tensor that shards change: assigning to it may put another one there.

    Attributes:
        registry: the attributes or buffers of an object, by name.
        key: its name among them.
        name: its name for people, and in checkpoints.
        chosen: the rule by which it is combined; None for the one that follows from its dtype.
    """

    registry: dict[str, Any]
    key: str
    name: str
    chosen: Rule | None = None

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        found: Tensor = self.registry[self.key]
        return found

    @property
    def rule(self) -> Rule:
        """The rule by which it is combined."""
        return self.chosen or ("mean" if self.tensor.is_floating_point() else "first")

    @property
    def form(self) -> list[Any]:
        """Dtype and shape, as JSON values; the length of what grows is left out."""
        return self._form_of(self.tensor)

    def fits(self, value: Tensor) -> bool:
        """Whether a tensor may come to be here."""
        return value.dim() == self.tensor.dim() and self._form_of(value) == self.form

    def _form_of(self, tensor: Tensor) -> list[Any]:
        dtype, shape = form_of(tensor)
        return [dtype, shape[1:] if self.rule == "cat" else shape]


def places_of(prefix: str, root: nn.Module) -> Iterator[BufferPlace]:
    """The places of a module's buffers."""
    for path, module in root.named_modules(prefix=prefix.rstrip(".")):
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield BufferPlace(module._buffers, key, f"{path}.{key}" if path else key)


def further_places(state: Mapping[str, Any]) -> list[BufferPlace]:
    """The places of further state, as ``run.prepare`` is given it.

    Args:
        state: the state by name: a tensor, ``(tensor, rule)``, or ``(object, {attribute: rule})``.

    Raises:
        ModelError: it is something else; says what it may be.
    """
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
        if isinstance(registry.get(key), Tensor):
            return registry
    raise ModelError(
        f"run.prepare(state=…): {name!r}, a {type(thing).__name__}, has no attribute {key} that holds a tensor. Lists "
        f"of tensors and numbers of Python cannot be combined: keep them as a tensor"
    )


def _place(registry: dict[str, Any], key: str, name: str, rule: Any, *, grows: bool) -> BufferPlace:
    tensor, said = registry[key], f"run.prepare(state=…): {name.removeprefix('state ')!r}"
    if rule is not None and rule not in RULES:
        raise ModelError(f"{said} has the rule {short(rule)}: there are {', '.join(RULES)}")
    if tensor.requires_grad:
        raise ModelError(f"{said} requires a gradient: what is trained belongs to an optimizer; else detach it")
    if rule == "mean" and not tensor.is_floating_point():
        raise ModelError(f"{said} is of {tensor.dtype}, which has no mean: use first, sum or max, or a float")
    if rule == "cat" and not (grows and tensor.dim()):
        raise ModelError(
            f"{said} is to grow (cat), which only an attribute with a first dimension can: give (object, "
            f"{{attribute: 'cat'}}), and let shards assign torch.cat([object.attribute, new])"
        )
    return BufferPlace(registry, key, name, rule)


def _require_apart(places: Sequence[BufferPlace]) -> None:
    seen: dict[int, str] = {}
    if len({place.name for place in places}) < len(places):
        raise ModelError(f"run.prepare(state=…): two have one name: {', '.join(place.name for place in places)}")
    for place in places:
        if (other := seen.setdefault(id(place.tensor), place.name)) != place.name:
            raise ModelError(f"run.prepare(state=…): {other} and {place.name} are one tensor: give it once")
