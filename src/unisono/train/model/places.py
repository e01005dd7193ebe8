"""Places of tensors that shards change (buffers, further state), and how what shards have made is combined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from unisono.checkpoint.tensor_bytes import DTYPES, KEPT, form_of
from unisono.errors import ModelError
from unisono.plan.tree import Node, SummationTree
from unisono.received import short
from unisono.reduce.buckets import ALIGNMENT
from unisono.reduce.transport import Transport
from unisono.train.model.staging import require_memory
from unisono.train.model.tensors import set_all, version_of

Rule = Literal["mean", "first", "last", "sum", "max", "min", "cat"]
"""The rule that combines a tensor which each shard has changed by itself."""

RULES: tuple[str, ...] = get_args(Rule)

FRESH = ("sum", "cat")
"""Rules by which each shard begins with nothing, and the results of all are added to what was there."""


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """The place that holds a buffer, or another tensor that shards change: the script may put another tensor there.

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
        """The tensor that is there now.

        Raises:
            ModelError: there is no tensor any more; names the place.
        """
        held = self.registry.get(self.key)
        tensor: Tensor = held if isinstance(held, Tensor) else self._held()
        return tensor

    @property
    def is_held(self) -> bool:
        """Whether there is a tensor at this place."""
        return isinstance(self.registry.get(self.key), Tensor)

    @property
    def rule(self) -> Rule:
        """The rule by which it is combined."""
        return self.chosen or ("mean" if self.tensor.is_floating_point() else "first")

    @property
    def form(self) -> list[Any]:
        """Dtype and shape, as JSON values, without the length of a tensor that grows."""
        return self._form_of(self.tensor)

    def fits(self, value: Tensor, present: Tensor | None = None) -> bool:
        """Whether a tensor may be put at this place.

        ``present`` is the one that it is to follow; by default the one that is there now.
        """
        present = self.tensor if present is None else present
        return value.dim() == present.dim() and self._form_of(value) == self._form_of(present)

    def put(self, tensor: Tensor) -> None:
        """Put another tensor at this place."""
        self.registry[self.key] = tensor

    def set(self, value: Tensor) -> None:
        """Set the tensor at this place to a value."""
        set_all([(self.tensor, value)])

    def move(self, device: torch.device) -> None:
        """Move the tensor to a device; other holders of it see it there, too."""
        if (tensor := self.tensor).device != device:
            tensor.data = tensor.data.to(device)

    def _held(self) -> Any:
        if not self.is_held:
            raise ModelError(
                f"the {self.name} is {short(self.registry.get(self.key))} now, and was a tensor, or a list of tensors, "
                f"when run.prepare was given it: assign what it was, for instance torch.tensor(…)"
            )
        return self.registry[self.key]

    def _form_of(self, tensor: Tensor) -> list[Any]:
        dtype, shape = form_of(tensor)
        return [dtype, shape[1:] if self.rule == "cat" else shape]


Placed = Sequence[tuple[BufferPlace, Tensor]]
"""Places, each with the value that its tensor is to have."""


def set_places(values: Placed) -> None:
    """Set the tensor of each place to its value."""
    for place, value in values:
        place.set(value)


def places_of(prefix: str, root: nn.Module) -> Iterator[BufferPlace]:
    """The places of a module's buffers."""
    for path, module in root.named_modules(prefix=prefix.rstrip(".")):
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield BufferPlace(module._buffers, key, f"{path}.{key}" if path else key)


_MOST_DIMENSIONS = 16
"""The most dimensions of a tensor whose shape workers exchange to join it with others."""


@dataclass(slots=True)
class _Joined:
    """A list as one tensor, and the tensors that it was made of, with their versions."""

    of: list[tuple[Tensor, int]]
    tensor: Tensor

    def is_of(self, listed: list[Tensor]) -> bool:
        return len(listed) == len(self.of) and all(
            tensor is other and tensor._version == version
            for tensor, (other, version) in zip(listed, self.of, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _ListedPlace(BufferPlace):
    """The place of a list of tensors, which together are one tensor: all of them, one behind the other.

    An empty list is a tensor of no elements, whose dtype and shape mean nothing. After a step, the list has one tensor.
    """

    _nothing: Tensor = field(default_factory=lambda: torch.empty(0))
    _joined: _Joined = field(default_factory=lambda: _Joined([], torch.empty(0)))

    @classmethod
    def of(cls, registry: dict[str, Any], key: str, name: str) -> _ListedPlace:
        """Make the place of a list, and join its tensors."""
        place = cls(registry, key, name, "cat")
        place.put(place.tensor)
        return place

    @property
    def tensor(self) -> Tensor:
        """All tensors of the list joined to one; the same object until the list changes.

        Raises:
            ModelError: there is no list of tensors any more; names the place.
        """
        tensors = self._held()
        if len(tensors) == 1 and tensors[0].dim():
            only: Tensor = tensors[0]
            return only
        if not tensors:
            return self._nothing
        if not self._joined.is_of(tensors):
            self._joined.of = [(tensor, version_of(tensor, self.name)) for tensor in tensors]
            self._joined.tensor = torch.cat([torch.atleast_1d(tensor) for tensor in tensors])
        return self._joined.tensor

    @property
    def is_held(self) -> bool:
        """Whether there is a list of tensors."""
        value = self.registry.get(self.key)
        return isinstance(value, list) and all(isinstance(tensor, Tensor) for tensor in value)

    @property
    def form(self) -> list[Any]:
        """The form of every list of this kind: an empty list has neither dtype nor shape."""
        return ["list"]

    def fits(self, value: Tensor, present: Tensor | None = None) -> bool:
        """Whether a tensor may be appended to the list: it has the form of those that are in it."""
        present = self.tensor if present is None else present
        if not value.dim() or value.dim() > _MOST_DIMENSIONS or value.dtype not in KEPT:
            return False
        (dtype, shape), (other_dtype, other_shape) = form_of(value), form_of(present)
        return not len(value) or not len(present) or [dtype, shape[1:]] == [other_dtype, other_shape[1:]]

    def put(self, tensor: Tensor) -> None:
        """Make a tensor the only one of the list; an empty one leaves the list empty."""
        self.registry[self.key] = [tensor] if len(tensor) else []

    def set(self, value: Tensor) -> None:
        """Make a copy of a value the only tensor of the list."""
        self.put(value.clone())


class Combining:
    """Combines what the shards of all workers have made. All methods are collective."""

    def __init__(self, tree: SummationTree, mine: range) -> None:
        self._tree, self._mine = tree, mine

    def added(
        self,
        transport: Transport,
        name: Hashable,
        leaf: Callable[[int], Sequence[Tensor]],
        share: Callable[[int], float],
    ) -> Sequence[Tensor]:
        """The sums over all shards along the summation tree, each as a tensor of one dimension.

        Args:
            transport: the transport between the workers.
            name: a name for these sums, the same in every step.
            leaf: a function that returns what a shard has made, tensors of one dtype.
            share: a function that returns the factor of a shard's tensors. A shard with the factor 0 is left out, even
                if its tensors are not finite.
        """
        leaves = {Node(shard, shard + 1): _flat(leaf(shard), share(shard)) for shard in self._mine}
        cover = self._tree.cover(self._mine.start, self._mine.stop)
        partials = [self._tree.finish(leaves, lambda left, right: left.add_(right), node) for node in cover]
        if not self._mine:  # a server has no shards, and sends zeros of the same form
            partials = [_flat(leaf(0), 0.0)]
        sizes = [tensor.numel() for tensor in leaf(0)]
        total = partials[0] if self._tree.shards == 1 else transport.reduce(name, partials)
        sums: Sequence[Tensor] = total[: sum(sizes)].split(sizes)
        return sums

    def furthest(self, pick: Pick, transport: Transport, base: Tensor, results: Sequence[Tensor]) -> Tensor:
        """The greatest or least of each element, over the base and what all shards have made of it."""
        own = reduce(pick, results, base)
        rows = transport.all_gather(own.reshape(-1))
        # Adding zero turns -0.0 into 0.0: `pick` may take either of them.
        return reduce(pick, rows.unbind()).view(base.shape) + torch.zeros((), dtype=base.dtype)

    def joined(self, transport: Transport, base: Tensor, results: Sequence[Tensor]) -> Tensor | None:
        """The base, and behind it what all shards have made, in the order of shards; None if their forms differ."""
        own = [tensor for tensor in results if len(tensor)]
        forms = transport.all_gather(_form_of(own)).tolist()
        present_forms = {tuple(form) for _, *form in forms if any(form)}
        if not present_forms:
            return base.clone()
        present_forms |= {tuple(_form_of([base]).tolist()[1:])} if len(base) else set()
        code, dimensions, *shape = present_forms.pop()
        if present_forms or code < 0:
            return None
        most_rows = max(rows for rows, *_ in forms)
        like = torch.empty((0, *shape[: dimensions - 1]), dtype=_CODES[code - 1], device=base.device)
        row_bytes = like.new_empty((1, *like.shape[1:])).nbytes
        data = torch.cat([like, *own]).reshape(-1).view(torch.uint8)
        gathered = transport.all_gather(torch.cat([data, data.new_zeros(most_rows * row_bytes - len(data))]))
        parts = [row[: rows * row_bytes] for row, (rows, *_) in zip(gathered.unbind(), forms, strict=True)]
        joined = torch.cat(parts).view(like.dtype).view(-1, *like.shape[1:])
        return torch.cat([base, joined]) if len(base) else joined


Pick = Callable[[Tensor, Tensor], Tensor]
"""Picks the greater or the lesser one of two tensors' elements."""

_CODES = tuple(DTYPES[name] for name in sorted(DTYPES))


def _form_of(tensors: Sequence[Tensor]) -> Tensor:
    """The number of rows that tensors have together, then their dtype, dimensions and further sizes, as numbers.

    The numbers behind the first are zeros if there are no tensors, and -1 if the tensors differ.
    """
    forms = {(tensor.dtype, tensor.shape[1:]) for tensor in tensors}
    row = torch.zeros(3 + _MOST_DIMENSIONS, dtype=torch.int64)
    if len(forms) == 1:
        ((dtype, shape),) = forms
        row[1], row[2] = _CODES.index(dtype) + 1, len(shape) + 1
        row[3 : 3 + len(shape)] = torch.tensor(shape, dtype=torch.int64)
    elif forms:
        row[1:] = -1
    row[0] = sum(map(len, tensors))
    return row


def _flat(tensors: Sequence[Tensor], share: float) -> Tensor:
    values = [tensor.reshape(-1) for tensor in tensors]
    flat = torch.cat([*values, values[0].new_zeros(-sum(map(len, values)) % ALIGNMENT)])
    # Set to zero, not multiplied by it: a buffer of an empty shard may hold infinities, and 0 × inf is nan.
    return flat.zero_() if not share else flat if share == 1.0 else flat.mul_(share)


def further_places(state: Mapping[str, Any]) -> list[BufferPlace]:
    """The places of further state, as ``run.prepare`` gets it.

    Args:
        state: the state by name: a tensor, ``(tensor, rule)``, or ``(object, {attribute: rule})``.

    Raises:
        ModelError: the state has another form; says which ones are possible.
    """
    if not isinstance(state, Mapping):
        raise ModelError(f"run.prepare(state=…) is {short(state)}: give a dict, of the state by name")
    places: list[BufferPlace] = []
    for name, given in state.items():
        match given:
            case Tensor():
                rule = "mean" if given.is_floating_point() else "first"
                places.append(_place({name: given}, name, f"state {name}", rule, grows=False))
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
        value = registry.get(key)
        if isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(part, Tensor) for part in value)):
            return registry
    raise ModelError(
        f"run.prepare(state=…): {name!r}, a {type(thing).__name__}, has no attribute {key} that holds a tensor, or a "
        f"list of tensors. Numbers of Python cannot be combined: keep them as a tensor"
    )


def _place(registry: dict[str, Any], key: str, name: str, rule: Any, *, grows: bool) -> BufferPlace:
    title = f"run.prepare(state=…): {name.removeprefix('state ')!r}"
    if rule is not None and rule not in RULES:
        raise ModelError(f"{title} has the rule {short(rule)}: there are {', '.join(RULES)}")
    if isinstance(registry[key], list):
        if rule != "cat":
            raise ModelError(f"{title} is a list of tensors, to which shards append: its rule can only be cat")
        return _ListedPlace.of(registry, key, name)
    tensor = registry[key]
    version_of(tensor, title)
    require_memory(tensor, title)
    if tensor.layout != torch.strided or _repeats(tensor):
        raise ModelError(f"{title} is sparse or expanded, so that it cannot be set to a value: give a dense copy of it")
    if tensor.requires_grad:
        raise ModelError(f"{title} requires a gradient: what is trained belongs to an optimizer; else detach it")
    if rule == "mean" and not tensor.is_floating_point():
        raise ModelError(f"{title} is of {tensor.dtype}, which has no mean: use first, sum, max or min, or a float")
    if rule == "cat" and not (grows and tensor.dim()):
        raise ModelError(
            f"{title} is to grow (cat), which only an attribute with a first dimension can: give (object, "
            f"{{attribute: 'cat'}}), and let shards assign torch.cat([object.attribute, new])"
        )
    return BufferPlace(registry, key, name, rule)


def _repeats(tensor: Tensor) -> bool:
    """Whether several of its elements are at one place in memory."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _require_apart(places: Sequence[BufferPlace]) -> None:
    seen: dict[int, str] = {}
    if len({place.name for place in places}) < len(places):
        names = ", ".join(place.name for place in places)
        raise ModelError(f"run.prepare(state=…): two entries have the same name; the names are {names}")
    for place in places:
        if (first_name := seen.setdefault(id(place.tensor), place.name)) != place.name:
            raise ModelError(f"run.prepare(state=…): {first_name} and {place.name} are the same tensor: list it once")
