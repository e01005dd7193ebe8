"""What a worker sees of its weights between two updates: bits that flip, and what the script writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from unisono.device import is_accelerator
from unisono.train.group.control import Flags
from unisono.train.model.at_rest import AtRest, Seen, kept_by
from unisono.train.model.body_writes import BodyWrites
from unisono.train.model.buffers import Buffers
from unisono.train.model.own_update import UpdateCause
from unisono.train.model.places import Placed
from unisono.train.model.prepared import Prepared
from unisono.train.step.call import Call


class WeightsWatch:
    """Looks at weights, buffers and the state of optimizers; keeps what others may need to follow an update.

    Args:
        prepared: models and optimizers.
        buffers: what shards make of the buffers.
        is_only: whether no other worker has the weights.
        looks: whether flipped bits are looked for.
        survives: whether this worker goes on when others are lost. Then others may need what an update was made from.
    """

    def __init__(
        self,
        prepared: Prepared,
        buffers: Buffers,
        *,
        is_only: bool,
        looks: bool,
        survives: bool,
    ) -> None:
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
            replace(
                own,
                digest=seen.digest,
                flipped=own.flipped or seen.has_flipped,
                amiss=seen.amiss,
            )
            for own in flags
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
