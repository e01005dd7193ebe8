"""Digests of the weights that each worker computes with, compared in every step before anything is committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from zlib import crc32

from unisono.train.group.majority import Verdict
from unisono.train.model.at_rest import AtRest, MemoryState, tensors_of
from unisono.train.model.update import settings_digest
from unisono.train.recovery.integrity import HeldStates, Integrity, Note, judged, nothing
from unisono.train.step.gradient_parts import MemoryChecks
from unisono.train.step.part import Attempt, Back, EngineBase, Hearing, Part
from unisono.train.step.step import Call
from unisono.train.step.word import Field
from unisono.words import MODULUS


class StateDigests(Part):
    """Finds out that a worker computes with other weights than most, or with weights that have changed by themselves.

    If there is only one worker, nobody else has its weights. So it looks once everything is worked out, right before
    the update.

    Attributes:
        looks_last: whether this is the only worker, and looks: then ``confirm`` judges.
    """

    fields = (
        Field("lost", "?", "each", "any"),
        Field("flipped", "?", "each", "any"),
        Field("digest", "Q", "each", "sum", MODULUS),
        Field("amiss", "Q", "each", "sum", MODULUS),
    )

    def __init__(self, integrity: Integrity, memory: MemoryChecks) -> None:
        self._integrity, self._memory = integrity, memory
        self._at_rest: AtRest | None = None
        self.looks_last = False
        self._note: Note = nothing

    def join(self, base: EngineBase) -> None:
        """Begin in a generation."""
        weights, optimizer_state = list(base.prepared.weights().values()), partial(tensors_of, base.prepared.optimizers)
        self._prepared, looks = base.prepared, base.execution.looks
        self._at_rest = AtRest(weights, base.buffers, optimizer_state, is_only=base.is_only) if looks else None
        self.looks_last = base.is_only and looks

    def leave(self) -> None:
        """End the generation."""
        self._at_rest = None

    def step_begins(self) -> None:
        """Note that a step begins: from now on only updates and the script change the state."""
        if self._at_rest is not None:
            self._at_rest.first()

    @property
    def has_flipped(self) -> bool:
        """Whether a bit has changed since the last update, where this worker has the only copy."""
        return self._at_rest is not None and self._at_rest.has_changed()

    def begin(self, call: Call) -> None:
        """Note the state at the beginning of a call: the update before has left it, or the script has written it."""
        if self._at_rest is not None:
            self._at_rest.begin()

    def ask(self, attempt: Attempt) -> None:
        """Look at what the shards were computed with. The only worker looks here as well, if shards are audited."""
        is_early = not self.looks_last or bool(attempt.audited)
        self._pending = self._start_look() if is_early else MemoryState

    def tell(self, attempt: Attempt) -> tuple[bool, bool, int, int]:
        """Return what was found."""
        memory = self._pending()
        return self._memory.has_lost, memory.has_flipped, memory.digest, memory.amiss

    def hear(
        self,
        attempt: Attempt,
        lost: Sequence[bool],
        flipped: Sequence[bool],
        digests: Sequence[int],
        amiss: Sequence[int],
    ) -> Hearing | None:
        """Take what all workers have found.

        Audits of the shards are pointless if a worker has computed with wrong weights: its processor is not to blame.
        """
        self._lost, self._held = lost, HeldStates(digests, flipped, amiss)
        return Hearing.ENOUGH if True in lost or judged(self._held) is not Verdict.RIGHT else None

    def look(self, attempt: Attempt) -> None:
        """Start the last look, if this worker is the only one."""
        if self.looks_last:
            self._pending = self._start_look()

    def judge(self, attempt: Attempt) -> Hearing | Back | None:
        """Judge whether all workers have computed with the same."""
        return None if self.looks_last else self._judged(attempt)

    def confirm(self, attempt: Attempt) -> Hearing | Back | None:
        """Judge whether the only worker has computed with what the update before has left."""
        memory = (self._start_look() if attempt.trouble else self._pending)()
        self._held = HeldStates([memory.digest], [self._held.flipped[0] or memory.has_flipped], [memory.amiss])
        return self._judged(attempt)

    def _judged(self, attempt: Attempt) -> Hearing | Back | None:
        place = attempt.call.step, attempt.call.number
        inputs = self._inputs(attempt) if self._integrity.is_on else ()
        verdict, self._note = self._integrity.judge(place, self._held, inputs, self._lost)
        if verdict is Verdict.RIGHT:
            return None
        return Hearing.HEAL if verdict is Verdict.HEALING else Back(self._note)

    def is_faulty(self) -> bool:
        """Whether a bit of the only worker has flipped."""
        return self.looks_last and self.has_flipped

    def done(self, attempt: Attempt) -> None:
        """Note the state, which stays as it is until the next update."""
        if self._at_rest is not None:
            self._at_rest.note()

    def note(self, attempt: Attempt) -> None:
        """Apply what was judged."""
        self._note()

    def _start_look(self) -> Callable[[], MemoryState]:
        return MemoryState if self._at_rest is None else self._at_rest.look()

    def _inputs(self, attempt: Attempt) -> list[int]:
        """Digests of settings, limits and the loss, which have to be the same when the call is computed again."""
        values = (attempt.call.clip, attempt.report.loss)
        return [settings_digest(self._prepared.optimizers), *[crc32(repr(value).encode()) for value in values]]
