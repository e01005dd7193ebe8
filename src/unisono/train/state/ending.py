"""The end of a run on this worker: who asks for it, what all workers have agreed on, and that it happens once."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any, NoReturn

from unisono.errors import Dismissed, JobError
from unisono.train.state.registry import UPDATE, Attribute, Registry

ENDS = (signal.SIGTERM, signal.SIGINT)
"""After these the process is to end; what else is listened to is a notice that this may come."""

SPREAD_S = 1.0
"""For a notice to reach all workers: each may have a handler of its own, which has to hear it. And for one Ctrl-C to
come from everybody who passes it on: torchrun does, and the terminal has told its workers already."""


class LeaveRequest:
    """Notes a SIGTERM, a notice, or a Ctrl-C instead of ending by it; a second SIGTERM or Ctrl-C ends at once.

    When the run is closed, after the checkpoint, noted signals go to the handlers that were there before. So a Ctrl-C
    that comes when all is trained raises KeyboardInterrupt then. Only the main thread can listen to signals.

    Args:
        notices: the numbers of further signals to listen to. One that is ignored, or that no Python code handles, stays
            as it is.
        prints: whether to print what was noted at the terminal: no launcher of ours does.
    """

    def __init__(self, notices: Sequence[int] = (), *, prints: bool = False) -> None:
        self._is_leaving, self._prints = False, prints
        self._signals: dict[int, float] = {}
        self._before: dict[int, Any] = {}
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            free = [number for number in notices if signal.getsignal(number) not in (None, signal.SIG_IGN)]
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, *free)}

    @property
    def requested(self) -> bool:
        """Whether this worker is asked to leave."""
        now = time.monotonic()
        return self._is_leaving or any(number in ENDS or now - at >= SPREAD_S for number, at in self._signals.items())

    def ask(self) -> None:
        """Note a request to leave that comes without a signal."""
        self._is_leaving = True

    def catch_interrupts(self) -> None:
        """Let a Ctrl-C ask to leave, too: a step begins, and from now on there is something to keep.

        Until then it raises KeyboardInterrupt, as ever. A handler of the script's own stays, and decides; the kernel of
        a notebook puts Python's own one back for each cell.
        """
        if self._listens:
            present = signal.getsignal(signal.SIGINT)
            another = getattr(present, "__self__", None)
            if present is signal.default_int_handler or (isinstance(another, LeaveRequest) and another is not self):
                # As it was at first: runs that take turns would else wait for each other.
                self._before.setdefault(signal.SIGINT, signal.signal(signal.SIGINT, self._note))

    def heed(self) -> None:
        """Forget a Ctrl-C, since this worker leaves: it need not raise KeyboardInterrupt as well."""
        self._signals.pop(signal.SIGINT, None)

    def close(self) -> None:
        """Restore the handlers that were there before, and send them the noted signals."""
        if not self._listens:
            return
        self._listens = False
        for number in self._before:
            if signal.getsignal(number) == self._note:
                signal.signal(number, self._below(number))
        for number in self._signals:
            if callable(signal.getsignal(number)):
                os.kill(os.getpid(), number)

    def _below(self, number: int) -> Any:
        """The handler before this one; if that is of a run that is closed by now, the handler before that."""
        below = self._before.get(number, signal.SIG_DFL)
        while isinstance(run := getattr(below, "__self__", None), LeaveRequest) and not run._listens:
            below = run._before.get(number, signal.SIG_DFL)
        return below

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._listens:  # somebody has put it back
            signal.signal(number, self._below(number))
            os.kill(os.getpid(), number)
            return
        at = self._signals.setdefault(number, now := time.monotonic())
        if at == now:
            self._print(number)
        elif number == signal.SIGTERM or (number == signal.SIGINT and now - at >= SPREAD_S):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            self.heed()
            os.kill(os.getpid(), number)

    def _print(self, number: int) -> None:
        if self._prints and number in ENDS:
            words = "the workers leave after this step, with a checkpoint (once more ends them at once)"
            with suppress(OSError):  # not by print, in whose middle the signal may have come
                os.write(2, f"unisono: {signal.Signals(number).name}: {words}\n".encode())


class Requests:
    """Set in a collective call, so that all workers have agreed on them, or none.

    Args:
        registry: the registry of state: a worker that lacks the state lacks these requests, too.

    Attributes:
        leave: a worker was asked to leave, and the job with it.
        regroup: a new generation is due.
        checkpoint: a checkpoint was asked for from outside.
        compare: the state is compared at the next boundary, since workers leave or come there. A generation that is
            formed before, after a loss, does not change that: some may be at it already, and others get this request
            from them.
    """

    def __init__(self, registry: Registry) -> None:
        self.leave = self.regroup = self.checkpoint = self.compare = False
        for name in ("leave", "checkpoint", "compare"):  # each generation begins without a request to regroup
            registry.add(name, Attribute(self, name, bool), within=("requests",), when=UPDATE, checkpoint=False)

    def note(self, *, leave: bool = False, regroup: bool = False, checkpoint: bool = False) -> None:
        """Note further requests of workers. Called in a change."""
        self.leave, self.regroup = self.leave or leave, self.regroup or regroup
        self.compare |= leave or regroup
        self.checkpoint |= checkpoint


class Ending:
    """Closes all that a run has opened, the newest first.

    Attributes:
        is_closed: whether the run is over on this worker.
        is_finished: whether run.finish has ended it.
    """

    def __init__(self, opened: ExitStack, request: LeaveRequest) -> None:
        self.is_closed = self.is_finished = False
        self._opened, self._request = opened, request
        self._farewell: Dismissed | None = None

    def also(self, close: Callable[[], None]) -> None:
        """Close this, too, before what is there already."""
        self._opened.callback(close)

    def require_open(self) -> None:
        """Refuse to go on when all is over.

        Raises:
            Dismissed: the others go on without this worker; its script has caught that.
            JobError: the run was closed.
        """
        if self._farewell is not None:
            raise self._farewell
        if self.is_closed:
            finished = "run.finish was called before: leave this call out, or make it before that. " * self.is_finished
            raise JobError(f"{finished}This run has ended: start another with unisono.init")

    def leave(self, farewell: Dismissed) -> NoReturn:
        """The others go on without this worker, or the job does later."""
        self._farewell = farewell
        self._request.heed()
        self.close()
        raise farewell

    def finish(self) -> None:
        """Close everything: run.finish has done its work."""
        self.is_finished = True
        self.close()

    def close(self) -> None:
        """Close everything, once."""
        if self.is_closed:
            return
        self.is_closed = True
        atexit.unregister(self.close)
        self._opened.close()
