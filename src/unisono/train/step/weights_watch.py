"""What a worker sees of its weights between two updates: bits that flip, and what the script writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from torch import Tensor

from unisono.checkpoint.quick_digest import Summing, flipped_bits
from unisono.device import is_accelerator
from unisono.errors import ModelError
from unisono.train.group.control import Flags
from unisono.train.model.at_rest import MOST_FLIPPED, AtRest, Seen, kept_by
from unisono.train.model.buffers import Buffers
from unisono.train.model.own_update import UpdateCause
from unisono.train.model.places import Placed
from unisono.train.model.prepared import Prepared
from unisono.train.step.step import Call
from unisono.words import Sums

FIRST, EVERY = 8, 64
"""The first calls, and every so many after them, are compared bit for bit."""


class ForwardWrites:
    """Compares the weights before the shards of a call with the weights after them.

    A replaced tensor, or a write that torch has counted, is seen in each call, and has the next ones compared as well.
    A write into ``parameter.data`` is seen only where bits are compared.

    Args:
        weights: the weights by name, also frozen ones.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._names, self._weights = list(weights), list(weights.values())
        self._counted = [each for each in self._weights if not each.is_inference()]
        self._summing = Summing()
        self._calls = 0
        self._was_written = False
        self._before: Sums | None = None
        self._marks: list[int] = []

    def begin(self) -> None:
        """The shards of a call are about to be computed."""
        is_compared = self._was_written or self._calls < FIRST or self._calls % EVERY == 0
        self._calls += 1
        self._before = self._summing.thirds(self._weights) if is_compared else None
        self._marks = self._marked()

    def require_none(self) -> None:
        """The shards are computed.

        Raises:
            ModelError: they have changed weights; names one of them. A flipped bit is none of this.
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
                f"the forward or backward pass changed {changed[0]}{others}. Each worker does so once for each of its "
                f"shards, so the weights would depend on the number of workers. Change weights in the loop's body, "
                f"after step.run; instead of max_norm of an embedding, renormalise its weight there"
            )

    def _marked(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._weights), *map(_VERSION, self._counted)]


_VERSION = attrgetter("_version")


class BodyWrites:
    """Compares what an update has left with what is there when the next call begins.

    Who is behind by an update, and is given what came of it, gets what the giver's body has changed as well, and then
    changes it once more. So if bodies change anything, updates are made again from their cause. Before that is known,
    in the first calls, they are anyway.

    What torch has counted is seen in each call; a write into ``tensor.data`` where bits are compared.

    Args:
        weights: the weights.
        buffers: a function that returns the buffers.
        kept: a function that returns the tensors that optimizers keep.
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
        """Whether a worker that is behind is to make the update of this call by itself."""
        return self._has_written or self._calls < FIRST

    def committed(self) -> None:
        """An update is made. Neither collective nor I/O."""
        is_compared = self._calls < FIRST or self._calls % EVERY == 0
        self._calls += 1
        self._is_new = False
        self._sums = self._summing.thirds(self._all()) if is_compared else None
        self._left = self._marked()

    def begin(self) -> None:
        """A call begins."""
        self._is_new = self.are_new
        self._has_written |= self._is_new
        self._left = self._sums = None  # what an attempt does that does not count is no write

    def goes_on(self) -> None:
        """A call is over that has changed nothing, and the body goes on: it may write yet."""
        self._sums = self._summing.thirds(self._all()) if self._calls < FIRST else None
        self._left = self._marked()

    @property
    def are_new(self) -> bool:
        """Whether anything was changed since the last update, before another call has begun."""
        if self._left is None or self._is_new:
            return self._is_new
        if self._left != self._marked():
            return True
        if self._sums is None:
            return False
        now = self._summing.thirds(self._all())
        return len(now) != len(self._sums) or flipped_bits(self._sums, now) > MOST_FLIPPED

    def _all(self) -> list[Tensor]:
        return [*self._weights, *self._buffers(), *self._kept()]

    def _marked(self) -> list[int]:
        tensors = [*self._weights, *self._buffers()] if self._sums is None else self._all()
        return [*map(Tensor.data_ptr, tensors), *(_VERSION(one) for one in tensors if not one.is_inference())]


class WeightsWatch:
    """Looks at weights, buffers and the state of optimizers; keeps what others may need to follow an update.

    Args:
        prepared: models and optimizers.
        buffers: what shards make of the buffers.
        is_only: whether no other worker has the weights.
        looks: whether flipped bits are looked for.
        survives: whether this worker goes on when others are lost. Then others may need what an update was made from.
    """

    def __init__(self, prepared: Prepared, buffers: Buffers, *, is_only: bool, looks: bool, survives: bool) -> None:
        self._prepared, self._is_only = prepared, is_only
        weights, kept = list(prepared.weights().values()), partial(kept_by, prepared.optimizers)
        self._cause = UpdateCause() if survives and not is_only else None
        self._body = BodyWrites(weights, lambda: [place.tensor for place in prepared.buffers], kept)
        self._at_rest = AtRest(weights, buffers, kept, is_only=is_only) if looks else None
        self._looked: Callable[[], Seen] | None = None
        self._is_on_accelerator = any(is_accelerator(weight.device) for weight in weights)

    def step_begins(self) -> None:
        """A step begins: from now on only updates and the script change the state."""
        if self._at_rest is not None:
            self._at_rest.first()

    def call_begins(self) -> None:
        """A call is about to be computed."""
        if self._cause is not None:
            self._body.begin()

    def attempt_begins(self) -> None:
        """The shards of an attempt are about to be computed."""
        self._looked = None
        if self._at_rest is not None:
            self._at_rest.begin()

    def look(self) -> Callable[[], Seen]:
        """Ask what the shards of an attempt were computed with; returns a function that waits for the answer."""
        return Seen if self._at_rest is None else self._at_rest.look()

    def look_last(self) -> None:
        """All is worked out: ask a device now, if this is the last look, for what :meth:`looked_last` tells."""
        if self.looks_last and self._is_on_accelerator:
            self._looked = self.look()

    @property
    def looks_last(self) -> bool:
        """Whether what was found is told right before the update: no other worker has to know before."""
        return self._is_only and self._at_rest is not None

    def looked_last(self, flags: Sequence[Flags]) -> Sequence[Flags]:
        """What workers have said of a call that is worked out, and what this one finds now."""
        if not self.looks_last:
            return flags
        seen, self._looked = (self._looked or self.look())(), None
        return [
            replace(own, digest=seen.digest, flipped=own.flipped or seen.has_flipped, amiss=seen.amiss) for own in flags
        ]

    @property
    def has_flipped(self) -> bool:
        """Whether a bit is not as the last update has left it, where this worker has the only copy."""
        return self._at_rest is not None and self._at_rest.has_changed()

    @property
    def is_written(self) -> bool:
        """Whether the script has changed since the last update what that has left."""
        return self._body.are_new

    def measured(self) -> None:
        """A call that has only measured is over, and the script goes on in the same body."""
        if self._cause is not None:
            self._body.goes_on()

    def cause(self, call: Call) -> UpdateCause | None:
        """What a worker that is behind needs to make the update of a call by itself, once it is made here."""
        is_needed = call.update is not None or self._body.needs_cause
        return self._cause if is_needed else None

    def keep(self, cause: UpdateCause | None, call: Call, loss: float, placed: Placed) -> None:
        """An update is about to be made: keep what it is made from, if ``cause`` is needed."""
        if cause is not None:
            cause.keep(loss, self._prepared.reduced_for(call.optimizers), self._prepared.buffers, placed)
        elif self._cause is not None:
            self._cause.let_go()

    def note(self) -> None:
        """An update is made: everything stays as it is until the next one."""
        if self._at_rest is not None:
            self._at_rest.note()

    def committed(self) -> None:
        """An update is done: what changes now, the script changes."""
        if self._cause is not None:
            self._body.committed()
