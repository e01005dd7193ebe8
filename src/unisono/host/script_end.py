"""The end of a process's script, and what is to be done once the script has ended well."""

from __future__ import annotations

import atexit
import dis
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

Act = Callable[[], None]

RETURNS = ("RETURN_VALUE", "RETURN_CONST")
"""The instructions with which a script's last line ends."""


class ScriptEnd:
    """Does what is left to do when a script has ended well: behind its last line, or in ``sys.exit`` with code 0.

    Whoever runs the script tells when that is (:meth:`reached`). Where Python itself runs it, that is found out when
    the process exits.

    Attributes:
        is_told: whether somebody tells.
    """

    def __init__(self, *, is_told: bool = False) -> None:
        self.is_told = is_told
        self._acts: list[Act] = []
        self._exit: _Exit | None = None

    def then(self, act: Act) -> Act:
        """Have something done then, once.

        Args:
            act: a function. If it raises, the script has failed.

        Returns:
            a function that forgets it.
        """
        self._acts.append(act)
        if not self.is_told and self._exit is None:
            self._exit = _Exit(self.reached)
        return lambda: self._forget(act)

    def reached(self) -> None:
        """The script has ended well: do what is left to do."""
        while self._acts:
            act = self._acts[0]
            act()
            self._forget(act)

    def _forget(self, act: Act) -> None:
        if act in self._acts:
            self._acts.remove(act)
        if not self._acts and self._exit is not None:
            self._exit.close()
            self._exit = None


class _Exit:
    """Finds out at the exit of the process whether its script has ended well, and tells.

    Args:
        reached: what is told.
    """

    def __init__(self, reached: Act) -> None:
        self._reached, self._process = reached, os.getpid()
        self._frame, self._code = _frame_of_script(), -1
        self._exit = sys.exit
        # Kept, because every look at a method makes a new object, and close compares.
        self._noting = self._note
        sys.exit = self._noting
        atexit.register(self._ends)

    def close(self) -> None:
        """Look no more."""
        atexit.unregister(self._ends)
        if sys.exit == self._noting:
            sys.exit = self._exit
        self._frame = None

    def _note(self, status: Any = None, /) -> NoReturn:
        """As ``sys.exit``; the code is kept, since nothing tells it when the process exits."""
        self._code = int(not (status is None or status == 0))
        self._exit(status)

    def _ends(self) -> None:
        if os.getpid() != self._process:  # what the script has forked
            return
        if not _is_at_its_end(self._frame) and self._code != 0:
            return
        try:
            self._reached()
        except BaseException as error:  # noqa: BLE001 (Python would print it and exit with 0)
            sys.excepthook(type(error), error, error.__traceback__)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(getattr(error, "exit_code", 1))


def _frame_of_script() -> FrameType | None:
    """The outermost frame of ``__main__``, which knows to the end of the process how far it has come."""
    frame, found = sys._getframe(), None
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            found = frame
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _is_at_its_end(frame: FrameType | None) -> bool:
    """Whether a script has come to its last line, and no exception has ended it."""
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] in RETURNS


OF_THIS_PROCESS = ScriptEnd()
"""The end of this process's script."""
