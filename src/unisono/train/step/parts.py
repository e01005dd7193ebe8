"""Optimizers like the script's, of slices of its parameters."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.quick_digest import flipped_bits
from unisono.train.model.at_rest import MOST_FLIPPED
from unisono.train.step.pieces import Slice
from unisono.train.step.script_memory import Kind, Places
from unisono.words import MODULUS, Words

SCALARS = frozenset(("step", "mu_product"))
"""State that optimizers keep once per tensor, whatever its size."""

Old = Callable[[int, str], Tensor]
"""Given a parameter's number and the name of a scalar, its value before the update."""


def kinds_of(state: Mapping[str, Any]) -> list[Kind]:
    """What an optimizer keeps for each element of a parameter."""
    return [(name, value.dtype) for name, value in state.items() if isinstance(value, Tensor) and name not in SCALARS]


def elements_of(tensor: Tensor, part: Slice) -> Tensor:
    """Some elements of a tensor without gaps, 1-D, in the order of memory."""
    return tensor.as_strided((part.stop - part.start,), (1,), tensor.storage_offset() + part.start)


def laid_out_like(whole: Tensor, value: Tensor) -> Tensor:
    """The value, with its elements in the order in which another tensor has them in memory."""
    if value.stride() == whole.stride():
        return value
    return torch.empty_strided(whole.shape, whole.stride(), dtype=value.dtype).copy_(value)


class Parts:
    """Optimizers of slices, which they update some at a time. What they keep once per tensor each slice has by itself.

    Args:
        optimizers: the script's optimizers.
        parameters: the parameters that they update, by number.
        slices: the slices, in the order of pieces.
        places: the tensors in which the slices lie, by the parameter's number: of the weights (None) and of each kind.
        old: the scalars of a parameter before the update; by default those that the script's optimizers hold.
        looks: whether to look for flipped bits: in each slice before it is updated, as the update before has left it.

    Attributes:
        has_flipped: whether there was one.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Sequence[Tensor],
        slices: Sequence[Sequence[Slice]],
        places: Places,
        old: Old | None = None,
        *,
        looks: bool = False,
    ) -> None:
        self.has_flipped = False
        self._parameters, self._optimizers = parameters, tuple(optimizers)
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._slices = [(part, elements_of(places[None][part.number], part)) for piece in slices for part in piece]
        tensors = iter(self._slices)
        pieces = [[next(tensors) for _ in piece] for piece in slices]
        self._scalars = _Scalars()
        self._first: dict[int, Tensor] = {}
        for part, tensor in self._slices:
            self._first.setdefault(part.number, tensor)
        self._inner: dict[int, Optimizer] = {}
        self._groups: dict[int, list[list[list[Tensor]]]] = {}
        for optimizer in optimizers:
            owned = [
                {numbers[id(one)] for one in group["params"] if id(one) in numbers} for group in optimizer.param_groups
            ]
            chosen = [[[tensor for part, tensor in piece if part.number in own] for own in owned] for piece in pieces]
            self._groups[id(optimizer)] = chosen
            self._inner[id(optimizer)] = self._made(optimizer, chosen)
            self._take_over(optimizer, places, old or self._held(optimizer))
        self._scalars.settle()
        kept = [[value for _, tensor in piece for value in self._kept_of(tensor)] for piece in pieces] if looks else []
        own = [[tensor for _, tensor in piece if tensor.numel()] for piece in pieces]
        self._looks = [_Look(tensors, others) for tensors, others in zip(own, kept, strict=False)]

    @property
    def tensors(self) -> list[tuple[int, Tensor]]:
        """Every slice that is not empty, with its parameter's number."""
        return [(part.number, tensor) for part, tensor in self._slices if tensor.numel()]

    def kept(self) -> list[Tensor]:
        """What is kept of the slices."""
        return [value for _, tensor in self._slices for value in self._kept_of(tensor)] + self._scalars.flats

    def sums(self) -> list[int]:
        """Of the words of all slices, and of what is kept of them, as the update has left them; empty without looks."""
        if not self._looks:
            return []
        left = [*(one.left for one in self._looks), *(one.kept_left for one in self._looks)]
        return [*chain.from_iterable(left), *(Words(flat).sum() for flat in self._scalars.flats)]

    def words(self, piece: int) -> int:
        """The sum of the words of a piece and of what is kept of it, as the update has left them; 0 without looks."""
        return self._looks[piece].total if self._looks else 0

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """An update begins: take the optimizers' settings, and the gradients."""
        for optimizer in optimizers:
            for group, ours in zip(optimizer.param_groups, self._inner[id(optimizer)].param_groups, strict=True):
                ours |= {name: value for name, value in group.items() if name != "params"}
        for part, tensor in self._slices:
            parameter = self._parameters[part.number]
            gradient = parameter.grad
            tensor.grad = None if gradient is None else elements_of(laid_out_like(parameter, gradient), part)
        self._scalars.follow()
        self._scalars.keep()

    def update(self, optimizers: Sequence[Optimizer], piece: int) -> None:
        """Update the slices of a piece."""
        if self._looks:
            self.has_flipped |= self._looks[piece].has_flipped()
        for optimizer in optimizers:
            inner, groups = self._inner[id(optimizer)], self._groups[id(optimizer)][piece]
            if any(groups):
                for group, tensors in zip(inner.param_groups, groups, strict=True):
                    group["params"] = tensors
                inner.step()
        if self._looks:
            self._looks[piece].note()

    def old(self, number: int, name: str) -> Tensor:
        """A scalar of a parameter before the update that has begun last."""
        return self._scalars.before(self._scalar(number, name))

    def publish(self) -> None:
        """Let the script's optimizers hold what is kept once per tensor: of each parameter's first slice."""
        for optimizer in self._optimizers:
            inner = self._inner[id(optimizer)]
            for number, tensor in self._first.items():
                for name, value in inner.state.get(tensor, {}).items():
                    outer = optimizer.state[self._parameters[number]]
                    if name in SCALARS and isinstance(value, Tensor) and isinstance(outer.get(name), Tensor):
                        outer[name].data = value  # whoever holds the script's tensor sees it go on
                    elif name in SCALARS or not isinstance(value, Tensor):
                        outer[name] = value

    def _kept_of(self, tensor: Tensor) -> list[Tensor]:
        return [
            value
            for inner in self._inner.values()
            for name, value in inner.state.get(tensor, {}).items()
            if isinstance(value, Tensor) and name not in SCALARS and value.numel()
        ]

    def _made(self, optimizer: Optimizer, chosen: Sequence[Sequence[Sequence[Tensor]]]) -> Optimizer:
        groups = [
            {**group, "params": [tensor for piece in chosen for tensor in piece[number]]}
            for number, group in enumerate(optimizer.param_groups)
        ]
        inner: Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]
        inner.state.clear()  # some begin with a state; what counts is the outer one's
        return inner

    def _held(self, optimizer: Optimizer) -> Old:
        def held(number: int, name: str) -> Tensor:
            value: Tensor = optimizer.state[self._parameters[number]][name]
            return value

        return held

    def _take_over(self, optimizer: Optimizer, places: Places, old: Old) -> None:
        inner, own = self._inner[id(optimizer)], set(self._numbers_in(optimizer))
        for part, tensor in self._slices:
            outer = optimizer.state.get(self._parameters[part.number]) if part.number in own else None
            for name, value in (outer or {}).items():
                mine = inner.state[tensor]
                if not isinstance(value, Tensor):
                    mine[name] = value
                elif name in SCALARS:
                    self._scalars.add(mine, name, old(part.number, name), (id(optimizer), part.number, name))
                else:
                    mine[name] = elements_of(places[name, value.dtype][part.number], part)

    def _numbers_in(self, optimizer: Optimizer) -> Iterator[int]:
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        return (numbers[id(one)] for group in optimizer.param_groups for one in group["params"] if id(one) in numbers)

    def _scalar(self, number: int, name: str) -> Tensor:
        tensor = self._first[number]
        value: Tensor = next(inner.state[tensor][name] for inner in self._inner.values() if tensor in inner.state)
        return value


class _Look:
    """What the update before has left of a piece, which is read again while it is in the cache anyway."""

    def __init__(self, tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        self._words, self._kept_words = [Words(each) for each in tensors], [Words(each) for each in kept]
        self.note()

    def note(self) -> None:
        """So it is left."""
        self.left, self.kept_left = self._sums()

    @property
    def total(self) -> int:
        """All together, modulo 2**64."""
        return (sum(self.left) + sum(self.kept_left)) % MODULUS

    def has_flipped(self) -> bool:
        """Whether a bit is another one now. A larger difference is a write of the script."""
        left, kept_left = self._sums()
        return 0 < flipped_bits([*self.left, *self.kept_left], [*left, *kept_left]) <= MOST_FLIPPED

    def _sums(self) -> tuple[list[int], list[int]]:
        return [words.sum() for words in self._words], [words.sum() for words in self._kept_words]


class _Scalars:
    """Numbers that stand in few tensors, so that all of them are kept at once."""

    def __init__(self) -> None:
        self._added: dict[torch.dtype, list[tuple[dict[str, Any], str, Tensor, Hashable]]] = {}
        self._flats: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self._firsts: dict[torch.dtype, Tensor] = {}

    @property
    def flats(self) -> list[Tensor]:
        return [flat for flat, _ in self._flats.values()]

    def add(self, state: dict[str, Any], name: str, value: Tensor, kind: Hashable) -> None:
        """One more, with the value that it has now. Those of a kind are the same number, each for a slice."""
        self._added.setdefault(value.dtype, []).append((state, name, value, kind))

    def settle(self) -> None:
        """That were all: each stands in the state for which it was added."""
        for dtype, added in self._added.items():
            flat = torch.stack([value.detach().reshape(()) for _, _, value, _ in added])
            firsts: dict[Hashable, int] = {}
            for number, (state, name, _, kind) in enumerate(added):
                state[name] = flat[number]
                firsts.setdefault(kind, number)
            self._firsts[dtype] = torch.tensor([firsts[kind] for *_, kind in added])
            self._flats[dtype] = flat, flat.clone()
        self._added.clear()

    def follow(self) -> None:
        """Each as the first of its kind, which the script sees and may have written to."""
        for dtype, (flat, _) in self._flats.items():
            flat.copy_(flat[self._firsts[dtype]])

    def keep(self) -> None:
        """Keep what they are now."""
        for flat, before in self._flats.values():
            before.copy_(flat)

    def before(self, value: Tensor) -> Tensor:
        """What one of them was when they were kept."""
        return self._flats[value.dtype][1][value.storage_offset()]
