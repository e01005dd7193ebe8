"""What scripts and plugins add to a run: callbacks, parts of a step, and functions that are called at its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

from unisono.arguments import require_types
from unisono.errors import JobError
from unisono.hooks import own_methods
from unisono.received import imported, short
from unisono.train.record.metrics_line import require_free_name
from unisono.train.step.listeners import Listener
from unisono.train.step.part import Attempt, Back, Hearing, Part
from unisono.train.step.step import Step
from unisono.train.step.word import Field

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


# Parts of a step: what they return, write and measure is checked, so that errors name the part.

WRITERS = ("gradient", "work_out", "look", "apply")
"""Methods that run while the mean gradient lies in the parameters."""

WITHOUT_ATTEMPT = ("join", "leave", "begin", "is_faulty", "measured")

CONCLUDING = ("hear", "judge", "confirm")


def checked(part: Part) -> Part:
    """A part that does what a script's part does, and checks it.

    Raises:
        JobError: it is no part, or its fields cannot be used.
    """
    if not isinstance(part, Part):
        raise JobError(f"run.add_part({short(part)}): make its class a subclass of unisono.Part")
    kind, names = type(part), [name for name in vars(Part) if callable(getattr(Part, name)) and name[0] != "_"]
    fields = part.fields
    if not isinstance(fields, (list, tuple)) or not all(isinstance(each, Field) for each in fields):
        raise JobError(f"{kind.__name__}.fields is {short(fields)}: make it a list of unisono.Field")
    methods = {name: method for name in names for method in own_methods(Part, name, [part])}
    if fields and "tell" not in methods:
        raise JobError(f"{kind.__name__} has fields: write a method tell(attempt) that returns their values")
    calls = {
        name: _method(method if name in WITHOUT_ATTEMPT else partial(_call, part, name, method))
        for name, method in methods.items()
    }
    same = {name: property(partial(_current, part, name)) for name in ("fields", "measures", "writes_gradient")}
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    result: Part = type(kind.__name__, (Part,), {**calls, **same, **named})()
    return result


def _current(part: Part, name: str, _: Part) -> Any:
    """An attribute of the script's part, which may set it as late as in ``join``."""
    return getattr(part, name)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *arguments: function(*arguments)


def _call(part: Part, name: str, method: Callable[..., Any], attempt: Attempt, *values: Any) -> Any:
    """Call a method of a script's part, and check what comes of it.

    Raises:
        JobError: the result, a figure or a write to the gradient is not allowed; names part and method.
    """
    about, figures = f"step {attempt.call.step}: {type(part).__name__}.{name}", dict(attempt.figures)
    may_write = name not in WRITERS or (name == "gradient" and part.writes_gradient)
    versions = [] if may_write else _versions(attempt)
    result = method(attempt, *values)
    if not may_write and _versions(attempt) != versions:
        raise JobError(
            f"{about} has changed the gradient: set writes_gradient = True in the class, and change it in the method "
            f"gradient alone"
        )
    for key, value in attempt.figures.items():
        if key not in figures or figures[key] is not value:
            require_free_name(key, f"{about}: attempt.figures")
    if name == "tell":
        return _told(part, about, result)
    if name in CONCLUDING and not (result is None or isinstance(result, (Hearing, Back))):
        raise JobError(
            f"{about} has returned {short(result)}: return None, or a Hearing or Back of unisono.train.step.part"
        )
    if name == "refuse" and result:
        attempt.refused = True
        return f"{type(part).__name__}: {result}"
    return result


def _versions(attempt: Attempt) -> list[tuple[int, int]]:
    gradients = (parameter.grad for parameter in attempt.gradients.trained)
    return [(id(gradient), 0 if gradient is None else gradient._version) for gradient in gradients]


def _told(part: Part, about: str, values: Any) -> Sequence[Any]:
    """The values of the fields in the form in which they travel, so that one worker hears what several would hear."""
    if not isinstance(values, (list, tuple)) or len(values) != len(part.fields):
        raise JobError(f"{about} has returned {short(values)}: return a value for each of {len(part.fields)} fields")
    return [field.value_of(value, about) for field, value in zip(part.fields, values, strict=True)]
