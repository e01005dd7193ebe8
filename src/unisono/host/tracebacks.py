"""Tracebacks and warnings for people: they point at the lines of the script, not at Unisono's own."""

from __future__ import annotations

import site
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from threading import get_ident
from traceback import FrameSummary, TracebackException, walk_stack
from typing import Any

from unisono.errors import UnisonoError, UnisonoWarning, WorkerLost

OURS = tuple(f"{Path(__file__).parents[2] / package}/" for package in ("unisono", "unisono_lab"))
"""The folders of Unisono's own code, which do not help the author of a script."""


def for_people(error: BaseException) -> str:
    """The traceback of an error, with one line for each call into Unisono's own code.

    If Unisono's own code fails without raising an error on purpose, that is a bug, and the traceback has all lines.
    """
    described = TracebackException.from_exception(error)
    _shorten(described, error, set())
    return "".join(described.format())


def _shorten(described: TracebackException, error: BaseException, seen: set[int]) -> None:
    """Shorten the tracebacks of an error and of the errors that led to it, in place."""
    seen.add(id(error))
    described.stack[:] = _shortened(described.stack, error)
    cause, context = error.__cause__, error.__context__
    if cause is not None and described.__cause__ is not None and id(cause) not in seen:
        is_same = isinstance(error, UnisonoError) and isinstance(cause, UnisonoError) and str(cause) in str(error)
        if is_same or (isinstance(error, WorkerLost) and isinstance(cause, OSError)):
            # The cause is the same error without the rank and the step, or an error of our own sockets.
            described.__cause__ = None
        else:
            _shorten(described.__cause__, cause, seen)
    elif context is not None and described.__context__ is not None and id(context) not in seen:
        _shorten(described.__context__, context, seen)


def _shortened(frames: Sequence[FrameSummary], error: BaseException) -> list[FrameSummary]:
    is_fault_of_ours = bool(frames) and _is_ours(frames[-1]) and not isinstance(error, UnisonoError | KeyboardInterrupt)
    if is_fault_of_ours:
        return list(frames)
    runs = [(is_ours, list(run)) for is_ours, run in groupby(frames, _is_ours)]
    return [frame for is_ours, run in runs for frame in (run[:1] if is_ours else run)]


def _is_ours(frame: FrameSummary) -> bool:
    return frame.filename.startswith(OURS)


SCRIPT_THREADS: dict[int, int] = {}
"""The numbers of the threads of scripts that wait for threads of ours, by the numbers of these."""


def warn(text: str) -> None:
    """Warn the author of the script, at the present line of the script; on some threads of ours there is none."""
    stacks = [sys._getframe(1), sys._current_frames().get(SCRIPT_THREADS.get(get_ident(), 0))]
    frames = [frame for stack in stacks if stack is not None for frame, _ in walk_stack(stack)]
    names = [frame.f_code.co_filename for frame in frames]
    of_script = [level for level, name in enumerate(names) if is_of_script(name)]
    # The script may itself be installed, as torchrun's is: then the nearest frame outside Unisono is taken.
    of_others = [
        level
        for level, name in enumerate(names)
        if not _is_under(name, OURS) and (_is_under(name, _LIBRARIES) or not _is_under(name, _PYTHONS))
    ]
    if levels := of_script or of_others:
        frame = frames[levels[0]]
        variables: dict[str, Any] = frame.f_globals
        module, registry = variables.get("__name__", "script"), variables.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, UnisonoWarning, names[levels[0]], frame.f_lineno, module, registry)
    else:
        warn_without_script(text)


def script_variables() -> dict[str, Any]:
    """The variables that the present line of the script sees, by name; none on a thread of ours."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    frame = next((frame for frame in frames if is_of_script(frame.f_code.co_filename)), None)
    return {} if frame is None else {**frame.f_globals, **frame.f_locals}


def warn_without_script(text: str) -> None:
    """Warn in a process or thread that runs no script; each text only once."""
    warnings.warn_explicit(text, UnisonoWarning, "unisono", 0, registry=_WARNED)


_WARNED: dict[Any, Any] = {}
"""Python's record of the warnings of our own threads, so that it shows each once."""

_LIBRARIES = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
"""The folders of installed packages: of the environment, the system and the user."""

_PYTHONS = (sysconfig.get_path("stdlib"), "<frozen ")
"""The beginnings of the names of Python's own files."""


@cache
def is_of_script(name: str) -> bool:
    """Whether a file is neither ours nor that of Python or an installed package."""
    return not _is_under(name, {*OURS, *_PYTHONS, *_LIBRARIES})


def _is_under(name: str, folders: Iterable[str]) -> bool:
    return name.startswith(tuple(folders))
