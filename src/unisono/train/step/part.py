"""A part of a step: a feature that has to do with what a step computes, tells the other workers, or changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.adapt.norms import GradientNorms
from unisono.hooks import Method, own_methods, together
from unisono.job import Job
from unisono.spans import Spans
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Workers
from unisono.train.model.buffers import Buffers
from unisono.train.model.places import Placed
from unisono.train.model.prepared import Prepared
from unisono.train.step.gradients import Gradients
from unisono.train.step.step import Call
from unisono.train.step.word import Field, StepReport

if TYPE_CHECKING:
    from unisono.train.step.loss import Shard


@dataclass(frozen=True, eq=False)
class EngineBase:
    """The base of an engine's parts.

    Attributes:
        execution: the settings of the computation that do not change bits.
        spans: the worker's spans, if they are kept.
    """

    job: Job
    workers: Workers
    prepared: Prepared
    device: torch.device
    execution: Execution
    buffers: Buffers
    spans: Spans | None

    @property
    def rank(self) -> int:
        """This worker's rank in messages."""
        return self.workers.named_rank

    @property
    def is_only(self) -> bool:
        """Whether no other worker has the weights."""
        return self.workers.world_size == 1


NO_REPORT = StepReport((), 0.0, 0.0, {}, ())


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt at a call, from its first shard to the update.

    Attributes:
        again: a function that computes any shard again, beside the attempt, and returns the digest of its results.
        parts: the parts of the step that take part in the call.
        changes: whether the gradients may be changed in place when the update is made.
        audited: the numbers of the shards of whose results a digest is made, to be compared.
        shards: this worker's shards, once they are computed.
        totals: the sums over all shards of all workers.
        report: the result of the step, once all workers have exchanged theirs.
        buffers: each buffer that changes, with its new value, once the update is worked out.
        seconds: the seconds of each part.
        norms: the norms of the gradients, if they are measured.
        figures: further measurements, by name.
        trouble: the reason for making no update, in words; empty if one is made.
        overflows: whether that reason is an overflow in float16, which is to be expected.
        refused: whether a part of the script's own gave that reason.
    """

    call: Call
    gradients: Gradients
    again: Callable[[int], str]
    parts: Part
    changes: bool = False
    audited: tuple[int, ...] = ()
    shards: list[Shard] = field(default_factory=list)
    totals: tuple[Tensor, ...] = ()
    report: StepReport = NO_REPORT
    buffers: Placed = ()
    seconds: dict[str, float] = field(default_factory=dict)
    norms: GradientNorms | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""
    overflows: bool = False
    refused: bool = False


class Hearing(Enum):
    """What a part concludes from the values that all workers have sent. It is the same on all workers."""

    AGAIN = "the attempt does not count, and is made again"
    ENOUGH = "no part behind this one hears of it: what it was made from is wrong"
    HEAL = "most workers hold the same state: the others are given it, and the call begins anew"


@dataclass(frozen=True, slots=True)
class Back:
    """The result of a call whose computation is not used, since the run goes back to an older state.

    Attributes:
        note: a function that marks the state as doubted; called in the change of the call.
        replaced: the ranks of workers that compute wrongly, and have to leave.
    """

    note: Callable[[], None]
    replaced: Sequence[int] = ()


class Part:
    """A part of a step. It overrides the methods that it needs; no other method of it is called.

    A call of ``step.run`` has two phases. First all workers work the change out together, and change nothing:
    ``begin``, ``attempt``, ``computed``, ``ask``, ``tell``, ``hear``, ``judge``, ``gradient``, ``work_out``, ``look``,
    ``refuse``, ``confirm``. If one worker is lost meanwhile, the others repeat this phase. Then each worker makes the
    change by itself, without any operation that could fail: ``apply``, the optimizers, ``done``, ``note``.

    Attributes:
        fields: the fields of the control word that belong to this part.
        measures: whether it takes part in calls that only measure.
        writes_gradient: whether its method ``gradient`` changes the gradient.
    """

    fields: Sequence[Field] = ()
    measures = False
    writes_gradient = False

    def join(self, base: EngineBase) -> None:
        """Called when a generation begins, with the base of its engine."""

    def leave(self) -> None:
        """Called when the generation is over, or another strategy begins."""

    def begin(self, call: Call) -> None:
        """Called before anything of a call is computed. The state is as the last step and the script have left it."""

    def attempt(self, attempt: Attempt) -> None:
        """Called when an attempt begins: its shards are about to be computed."""

    def computed(self, attempt: Attempt) -> None:
        """Called when this worker's shards are computed; those of other workers may not be."""

    def ask(self, attempt: Attempt) -> None:
        """Called when the sums of all workers are here, to ask devices for values: parts share one wait for them."""

    def tell(self, attempt: Attempt) -> Sequence[Any]:
        """Return the values of this part's fields, in their order."""
        return ()

    def hear(self, attempt: Attempt, *values: Any) -> Hearing | Back | None:
        """Called with the values of all workers, combined as the fields say. May be collective; changes no state."""

    def judge(self, attempt: Attempt) -> Hearing | Back | None:
        """Called when the attempt counts; returns ``Hearing`` or ``Back`` if its result is not used.

        The last part is called first. May be collective; changes no state.
        """

    def gradient(self, attempt: Attempt) -> None:
        """Called when the mean gradient is in the parameters, which it may change with ``writes_gradient``.

        May be collective.
        """

    def rewrite(self, attempt: Attempt) -> None:
        """Called when the step's gradient is about to be changed in place."""

    def work_out(self, attempt: Attempt) -> None:
        """Work out what all workers compute together of the update. Collective; changes neither weights nor buffers."""

    def look(self, attempt: Attempt) -> None:
        """Called when all is worked out, and nothing collective follows."""

    def refuse(self, attempt: Attempt) -> str:
        """Return the reason for not making the update that was worked out; empty for none.

        The job then ends, or skips the step with ``on_nan="skip"``. Every worker must return the same.
        """
        return ""

    def is_faulty(self) -> bool:
        """Whether the memory of the only worker was at fault; ``confirm`` then says what follows."""
        return False

    def confirm(self, attempt: Attempt) -> Hearing | Back | None:
        """Called if there is only one worker, once the update is worked out or left out.

        Returns ``Hearing`` or ``Back`` if the update is not to be made.
        """

    def apply(self, attempt: Attempt) -> None:
        """Called when the update is about to be made. Neither collective nor I/O.

        It should change nothing that the update depends on, such as the learning rate: a worker that has missed an
        update makes it later from the gradient of the others, without this call. If the result differs, the run goes
        back to an older state.
        """

    def done(self, attempt: Attempt) -> None:
        """Called when the update is made. Neither collective nor I/O."""

    def note(self, attempt: Attempt) -> None:
        """Called in the change, after the update, which may have been left out (``attempt.trouble``). No I/O."""

    def measured(self) -> None:
        """Called when a call that has only measured is over."""


class Parts(Part):
    """Parts as one: each method calls that of the parts which override it, in their order."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.all = tuple(parts)
        for name in _ALIKE:
            setattr(self, name, together(own_methods(Part, name, self.all)))
        self.writes_gradient = any(part.writes_gradient for part in self.all)
        if self.writes_gradient:
            self.gradient = together(  # type: ignore[method-assign]
                [
                    partial(self._rewriting, method) if part.writes_gradient else method
                    for part in self.all
                    for method in own_methods(Part, "gradient", [part])
                ]
            )
        self.fields = [field for part in self.all for field in part.fields]
        self._telling, self._judging = own_methods(Part, "tell", self.all), own_methods(Part, "judge", self.all[::-1])
        self._confirming = own_methods(Part, "confirm", self.all[::-1])
        self._refusing, self._blaming = (
            own_methods(Part, "refuse", self.all),
            own_methods(Part, "is_faulty", self.all),
        )
        ends = list(accumulate(len(part.fields) for part in self.all))
        self._hearing = [
            (hear, slice(end - len(part.fields), end))
            for part, end in zip(self.all, ends, strict=True)
            for hear in own_methods(Part, "hear", [part])
        ]
        self._combine = [field.of_workers for field in self.fields]

    def _rewriting(self, gradient: Method, attempt: Attempt) -> None:
        """Have the gradient checked before a part changes it, and as it is then."""
        self.rewrite(attempt)
        gradient(attempt)
        attempt.gradients.keep()

    def tell(self, attempt: Attempt) -> list[Any]:
        """The values of all fields."""
        return [value for tell in self._telling for value in tell(attempt)]

    def hear(self, attempt: Attempt, *values: Any) -> Hearing | Back | None:
        """Call each part with the values of its fields, until one returns a result other than None.

        The values are those that workers have sent, by field and rank.
        """
        combined = [combine(value) for combine, value in zip(self._combine, values, strict=True)]
        for hear, places in self._hearing:
            if (result := hear(attempt, *combined[places])) is not None:
                return result  # type: ignore[no-any-return]
        return None

    def judge(self, attempt: Attempt) -> Hearing | Back | None:
        """The first result other than None; the last part is asked first."""
        result: Hearing | Back | None = _first(self._judging, attempt)
        return result

    def confirm(self, attempt: Attempt) -> Hearing | Back | None:
        """The first result other than None once the update is worked out; the last part is asked first."""
        result: Hearing | Back | None = _first(self._confirming, attempt)
        return result

    def refuse(self, attempt: Attempt) -> str:
        """The first reason for making no update; empty for none."""
        return _first(self._refusing, attempt) or ""

    def is_faulty(self) -> bool:
        """Whether any part has found a fault."""
        return any(blames() for blames in self._blaming)


def _first(methods: Sequence[Method], attempt: Attempt) -> Any:
    """The first result of these methods that is true; None if there is none."""
    for method in methods:
        if result := method(attempt):
            return result
    return None


_OWN = ("fields", "measures", "writes_gradient", "tell", "hear", "judge", "confirm", "refuse", "is_faulty")
"""Names of which ``Parts`` combines the values or results."""

_ALIKE = [name for name in vars(Part) if not name.startswith("_") and name not in _OWN]
"""Names of the other methods, which ``Parts`` calls for one part after the other."""
