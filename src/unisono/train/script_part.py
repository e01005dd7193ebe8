"""Parts of a step that a script adds: what they return, write and measure is checked, so that errors name the part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.errors import JobError
from unisono.received import short
from unisono.train.record.metrics_line import require_free_name
from unisono.train.step.part import Attempt, Back, Hearing, Part, own_methods
from unisono.train.step.word import Field

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
