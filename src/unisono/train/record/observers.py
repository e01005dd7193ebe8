"""Whoever wants to know what happens in a run, and is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

from unisono.errors import JobError

if TYPE_CHECKING:
    from unisono.train.step.step import Step

Event = Literal["step_begins", "step_computed", "step_ends"]
"""``step_begins``: its samples are loaded, and nothing of it is computed. ``step_computed``: this worker has computed
its shards, and has the others' yet to add; once per call of ``step.run``, and again if that is repeated. ``step_ends``:
it is committed, and the loop's body is done."""

Callback = Callable[[Any, "Step"], Any]
"""``callback(run, step)``, on this worker's main thread."""


class Observers:
    """The callbacks of a run, in the order in which they came."""

    def __init__(self) -> None:
        self._callbacks: dict[Event, list[Callback]] = {event: [] for event in get_args(Event)}

    def add(self, event: Event, callback: Callback) -> None:
        """Have a callback called whenever the event happens.

        Raises:
            JobError: there is no such event; lists those that there are.
        """
        if event not in self._callbacks:
            raise JobError(f"run.on({event!r}): there is no such event; choose of {', '.join(self._callbacks)}")
        self._callbacks[event].append(callback)

    def tell(self, event: Event, run: Any, step: Step) -> None:
        """The event happens. What a callback raises ends the step, as if the script had raised it."""
        for callback in self._callbacks[event]:
            callback(run, step)
