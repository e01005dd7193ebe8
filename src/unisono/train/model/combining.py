"""Further state of a script, and how tensors that each shard has changed by itself are combined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from unisono.checkpoint.tensor_bytes import DTYPES
from unisono.errors import ModelError
from unisono.plan.tree import Node, SummationTree
from unisono.received import short
from unisono.reduce.buckets import ALIGNMENT
from unisono.reduce.transport import Transport
from unisono.train.model.places import MOST_DIMENSIONS, RULES, BufferPlace, ListedPlace
from unisono.train.model.staging import require_memory
from unisono.train.model.tensors import version_of


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
    row = torch.zeros(3 + MOST_DIMENSIONS, dtype=torch.int64)
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
        return ListedPlace.of(registry, key, name)
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
