"""Writes to weights between two updates: by the passes of shards, which are refused, and by the script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.tensor_bytes import form_of
from unisono.errors import ModelError, Unreadable
from unisono.received import value_of
from unisono.train.model.at_rest import MOST_FLIPPED, tensors_of
from unisono.train.model.places import BufferPlace, Placed, set_places
from unisono.train.step.part import Attempt, EngineBase, Part
from unisono.train.step.step import Call
from unisono.word_sums import Summing, flipped_bits
from unisono.words import Sums

FIRST, EVERY = 8, 64
"""Bits are compared in the first 8 calls, and in every 64th after them."""


class ForwardWrites(Part):
    """Compares the weights before the shards of a call with the weights after them.

    A replaced tensor, or a write that torch has counted, is found in each call, and has later calls compared bit for
    bit. A write into ``parameter.data`` is found only in calls that are compared bit for bit. Frozen weights are
    compared, too.
    """

    measures = True

    def __init__(self, weights: Mapping[str, Tensor], rank: int) -> None:
        self._names, self._weights, self._rank = list(weights), list(weights.values()), rank
        self._counted = [weight for weight in self._weights if not weight.is_inference()]
        self._summing = Summing()
        self._calls = 0
        self._was_written = False
        self._before: Sums | None = None
        self._marks: list[int] = []

    def attempt(self, attempt: Attempt) -> None:
        """Note the weights when the shards are about to be computed."""
        is_compared = self._was_written or self._calls < FIRST or self._calls % EVERY == 0
        self._calls += 1
        self._before = self._summing.thirds(self._weights) if is_compared else None
        self._marks = self._marked()

    def computed(self, attempt: Attempt) -> None:
        """Compare the weights once the shards are computed.

        Raises:
            ModelError: the shards have changed weights; names one of them. A flipped bit is not taken for a change.
        """
        is_written = self._marked() != self._marks
        self._was_written |= is_written
        if self._before is None:
            return
        after = self._summing.thirds(self._weights)
        pairs = zip(self._names, self._before, after, strict=True)
        changed = [name for name, old, new in pairs if (old != new).any()]
        if changed and (is_written or flipped_bits(self._before, after) > MOST_FLIPPED):
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ModelError(
                f"step {attempt.call.step}, rank {self._rank}: the forward or backward pass changed {changed[0]}"
                f"{others}. Each worker does so once for each of its shards, so the weights would depend on the number "
                f"of workers. Change weights in the loop's body, after step.run, or in a loop of your own where "
                f"run.sync_gradients is true; instead of max_norm of an embedding, renormalise its weight there"
            )

    def _marked(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._weights), *map(_VERSION, self._counted)]


_VERSION = attrgetter("_version")


class BodyWrites:
    """Compares the state after an update with the state at the beginning of the next call.

    A worker that is behind by an update, and is given the state after it, also gets what the giver's loop body has
    changed since, and would then make that change once more. So if loop bodies change anything, such a worker makes the
    update again from its cause. It also does so in the first calls, when this is not known yet.

    Writes that torch has counted are found in each call; a write into ``tensor.data`` is found only where bits are
    compared. ``kept`` returns the tensors that optimizers keep.
    """

    def __init__(
        self, weights: Sequence[Tensor], buffers: Callable[[], Sequence[Tensor]], kept: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._weights, self._buffers, self._kept, self._summing = weights, buffers, kept, Summing()
        self._has_written = self._is_new = False
        self._calls = 0
        self._left: list[int] | None = None
        self._sums: Sums | None = None

    @property
    def needs_cause(self) -> bool:
        """Whether a worker that is behind has to make the update of this call by itself."""
        return self._has_written or self._calls < FIRST

    def committed(self) -> None:
        """Note the state after an update. Neither collective nor I/O."""
        is_compared = self._calls < FIRST or self._calls % EVERY == 0
        self._calls += 1
        self._is_new = False
        self._sums = self._summing.thirds(self._all()) if is_compared else None
        self._left = self._marked()

    def begin(self) -> None:
        """Compare the state when a call begins."""
        self._is_new = self.are_new
        self._has_written |= self._is_new
        # The writes of an attempt that does not count must not be taken for the script's.
        self._left = self._sums = None

    def note_unchanged(self) -> None:
        """Note the state after a call that has changed nothing, since the loop body may still write."""
        self._sums = self._summing.thirds(self._all()) if self._calls < FIRST else None
        self._left = self._marked()

    @property
    def are_new(self) -> bool:
        """Whether the script has changed anything between the last update and the next call."""
        if self._left is None or self._is_new:
            return self._is_new
        if self._left != self._marked():
            return True
        if self._sums is None:
            return False
        sums = self._summing.thirds(self._all())
        return len(sums) != len(self._sums) or flipped_bits(self._sums, sums) > MOST_FLIPPED

    def _all(self) -> list[Tensor]:
        return [*self._weights, *self._buffers(), *self._kept()]

    def _marked(self) -> list[int]:
        tensors = [*self._weights, *self._buffers()] if self._sums is None else self._all()
        return [*map(Tensor.data_ptr, tensors), *(_VERSION(tensor) for tensor in tensors if not tensor.is_inference())]


@dataclass(slots=True)
class UpdateCause:
    """A copy of what an update was made from: the loss, the step's gradient, and the buffers that changed with it.

    Attributes:
        gradients: the gradients of the parameters; None for those that no shard used.
        buffers: the buffers that changed, by their numbers.
    """

    loss: float = 0.0
    gradients: list[Tensor | None] = field(default_factory=list)
    buffers: list[tuple[int, Tensor]] = field(default_factory=list)
    _memory: dict[int, Tensor] = field(default_factory=dict)  # of the gradients by number, used again in each step

    @torch.no_grad()
    def keep(
        self, loss: float, parameters: Mapping[str, Tensor], places: Sequence[BufferPlace], buffers: Placed
    ) -> None:
        """Make the copy, before the script changes anything.

        ``places`` are all buffers, and ``buffers`` those that changed, with their new values.
        """
        numbers = {id(place): number for number, place in enumerate(places)}
        self.loss = loss
        self.gradients = [self._copied(number, parameter.grad) for number, parameter in enumerate(parameters.values())]
        self.buffers = [(numbers[id(place)], value.clone()) for place, value in buffers]

    def let_go(self) -> None:
        """Drop the copy, which takes as much memory as the gradients."""
        self.gradients, self.buffers = [], []
        self._memory.clear()

    def tree(self) -> list[Any]:
        """The loss, gradients and buffers as lists, to be broadcast."""
        return [self.loss, self.gradients, [list(buffer) for buffer in self.buffers]]

    @torch.no_grad()
    def set(self, parameters: Mapping[str, Tensor], places: Sequence[BufferPlace]) -> None:
        """Set gradients and buffers to the copied values.

        Raises:
            Unreadable: the copy is of another model.
        """
        if len(self.gradients) != len(parameters):
            raise Unreadable(f"another worker sent {len(self.gradients)} gradients; expected {len(parameters)}")
        for parameter, gradient in zip(parameters.values(), self.gradients, strict=True):
            parameter.grad = None if gradient is None else _like(parameter, gradient)
        set_places([(places[number], value) for number, value in self.buffers])

    @classmethod
    def of(cls, tree: Any, places: Sequence[BufferPlace]) -> UpdateCause:
        """Make a cause from what :meth:`tree` returned on another worker.

        Raises:
            Unreadable: the value has another form, or buffers that this model does not have.
        """
        form = tuple[float, list[Tensor | None], list[tuple[int, Tensor]]]
        loss, gradients, buffers = value_of(form, tree, "the gradient that another worker gave")
        if not all(0 <= number < len(places) and places[number].fits(value) for number, value in buffers):
            raise Unreadable("another worker sent buffers that this one does not have")
        return cls(loss, gradients, buffers)

    def _copied(self, number: int, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        memory = self._memory.get(number)
        if memory is None or form_of(memory) != form_of(gradient):
            memory = self._memory[number] = torch.empty_like(gradient)
        return memory.copy_(gradient)


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    _require_form(parameter, gradient)
    return torch.empty_like(parameter).copy_(gradient)


def _require_form(tensor: Tensor, value: Tensor) -> None:
    if form_of(tensor) != form_of(value):
        raise Unreadable(f"another worker sent a gradient of the form {form_of(value)}; expected {form_of(tensor)}")


def _held_in(places: Sequence[BufferPlace]) -> list[Tensor]:
    """The tensors at these places; between two loops a script may change a model, and take some away."""
    return [place.tensor for place in places if place.is_held]


class Followers(Part):
    """Keeps the cause of an update for other workers, which are behind by it if one worker is lost meanwhile.

    Attributes:
        was_written: whether the script had changed what the last update had left, when the last generation ended.
    """

    was_written = False
    _body: BodyWrites | None = None

    def join(self, base: EngineBase) -> None:
        """Begin a generation. A single worker needs no causes."""
        self._prepared, self._body, self._cause = base.prepared, None, UpdateCause()
        if not base.is_only:
            weights, kept = list(base.prepared.weights().values()), partial(tensors_of, base.prepared.optimizers)
            self._body = BodyWrites(weights, partial(_held_in, base.prepared.buffers), kept)

    def leave(self) -> None:
        """End the generation; note whether the script has written since the last update."""
        self.was_written, self._body = self._body is not None and self._body.are_new, None
        self._cause = UpdateCause()  # not cleared in place: a worker that is behind may still be given the old one

    def begin(self, call: Call) -> None:
        """Note what the script has changed since the last update."""
        if self._body is not None:
            self._body.begin()

    def cause(self, call: Call) -> UpdateCause | None:
        """The cause of a call's update, if a worker that is behind has to make the update by itself."""
        is_needed = self._body is not None and (call.update is not None or self._body.needs_cause)
        return self._cause if is_needed else None

    def apply(self, attempt: Attempt) -> None:
        """Keep the cause of the update, if it is needed."""
        if (cause := self.cause(attempt.call)) is not None:
            parameters = self._prepared.reduced_for(attempt.call.optimizers)
            cause.keep(attempt.report.loss, parameters, self._prepared.buffers, attempt.buffers)
        else:
            self._cause.let_go()

    def done(self, attempt: Attempt) -> None:
        """Note the state after the update: later changes are the script's."""
        if self._body is not None:
            self._body.committed()

    def measured(self) -> None:
        """Note the state after a call that has only measured."""
        if self._body is not None:
            self._body.note_unchanged()
