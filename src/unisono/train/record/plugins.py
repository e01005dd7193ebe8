"""The callbacks of scripts and plugins, and the search for plugins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

from unisono.arguments import require_types
from unisono.errors import JobError
from unisono.received import imported, short
from unisono.train.step.listeners import Listener
from unisono.train.step.step import Step

Event = Literal["step_begins", "step_computed", "step_ends"]
"""``step_begins``: its samples are loaded, and nothing of it is computed. ``step_computed``: this worker has computed
its shards, and has the others' yet to add; once per call of ``step.run``, and again if that is repeated. ``step_ends``:
it is committed, and the loop's body is done."""

Callback = Callable[[Any, Step], Any]
"""``callback(run, step)``, on this worker's main thread."""


class Callbacks(Listener):
    """The callbacks of a run, in the order in which they came."""

    def __init__(self) -> None:
        self._callbacks: dict[Event, list[Callable[[Step], Any]]] = {event: [] for event in get_args(Event)}

    def add(self, event: Event, callback: Callback, run: Any) -> None:
        """Have a callback called with the run whenever the event happens.

        Raises:
            JobError: there is no such event, or the callback is no function; says what there is.
        """
        require_types(Callbacks.add, {"callback": callback})
        if event not in self._callbacks:
            raise JobError(f"run.on({short(event)}): there is no such event; choose of {', '.join(self._callbacks)}")
        self._callbacks[event].append(partial(callback, run))

    def step_begins(self, step: Step) -> None:
        """Call those for ``step_begins``."""
        for callback in self._callbacks["step_begins"]:
            callback(step)

    def step_computed(self, step: Step, shards: int, seconds: float) -> None:
        """Call those for ``step_computed``."""
        for callback in self._callbacks["step_computed"]:
            callback(step)

    def step_ends(self, step: Step, after: int) -> None:
        """Call those for ``step_ends``."""
        for callback in self._callbacks["step_ends"]:
            callback(step)


# What is added to a run from outside of its script: functions that are named in the environment.

Plugin = Callable[[Any], Any]
"""Called with the run when it has begun: before the script gets it."""


def load_plugins(names: Sequence[str]) -> list[Plugin]:
    """Import plugins.

    Raises:
        JobError: one cannot be imported; names it and says why.
    """
    return [_load(name) for name in names]


def _load(name: str) -> Plugin:
    function = imported(name, "UNISONO_PLUGINS")
    if not callable(function):
        raise JobError(f"UNISONO_PLUGINS={short(name)} is no function")
    plugin: Plugin = function
    return plugin
