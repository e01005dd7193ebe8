"""Loggers follow ``metrics.jsonl``: what is committed there they get once, on a thread of the main worker."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.checkpoint.folder import RunFolder
from unisono.data.order import Order
from unisono.errors import UnisonoWarning
from unisono.loggers.logger import Logger
from unisono.plan.batches import Batches
from unisono.received import why_of
from unisono.train.group.membership import Membership
from unisono.train.record.logged_steps import CommittedSteps, LoggedSteps
from unisono.train.state.trained import Doubt
from unisono.train.step.listeners import Listener
from unisono.train.step.step import Step

LATEST = 2**62
"""No step comes so late."""

PATIENCE_S = 60.0
"""How long the end of a run waits for loggers, such as one whose server does not answer."""


class LogFollower(Listener):
    """Opens loggers where a worker becomes the main one, and gives them what ``metrics.jsonl`` gets, once a second.

    The file is the one truth: it has each committed step once, whichever worker was the main one, and loses those that
    are computed again. A worker that may not write there gives nothing to its loggers.

    Args:
        folder: the run folder.
        membership: the members of the job.
        job: the settings of the job.
        loggers: the loggers.
        look_s: seconds between two looks at the file.
    """

    def __init__(
        self,
        folder: RunFolder,
        membership: Membership,
        job: Mapping[str, Any],
        loggers: Sequence[Logger],
        look_s: float,
    ) -> None:
        self._folder, self._membership, self._look_s = folder, membership, look_s
        self._committed = CommittedSteps(folder.metrics.path)
        self._loggers = [LoggedSteps(logger, folder.path, job) for logger in loggers]
        self._told = set[str]()
        self._again = deque[int]()  # from which steps on others were computed again
        self._closing, self._is_abandoned, self._is_preempted = threading.Event(), False, False
        self._thread: threading.Thread | None = None

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """The file has by now what is left of an earlier start."""
        self._begin()

    def renewed(self) -> None:
        """This may be the main worker now."""
        self._begin()

    def step_ends(self, step: Step, after: int) -> None:
        """Say which loggers failed, each once."""
        self._tell()

    def went_back(self, reached: int, step: int, doubt: Doubt) -> None:
        """What was logged of the steps from there on may be wrong."""
        self._again.append(step)

    def preempted(self) -> None:
        """The job goes on later: what was logged behind its last step comes again."""
        self._is_preempted = True

    def abandon(self) -> None:
        """Give the loggers nothing more, as if this process had been killed."""
        self._is_abandoned = True
        self.close()

    def close(self) -> None:
        """Give the loggers what is left."""
        self._closing.set()
        if self._thread is None:
            return
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            names = ", ".join(each.logger.name for each in self._loggers)
            _warn(f"{names}: not everything is logged after {PATIENCE_S:g} s. The run ends without the rest")
        self._tell()

    def _begin(self) -> None:
        if self._loggers and self._thread is None and self._membership.is_main:
            self._thread = threading.Thread(target=self._live, name="unisono-loggers", daemon=True)
            self._thread.start()

    def _tell(self) -> None:
        for each in self._loggers:
            if each.failed and each.logger.name not in self._told:
                self._told.add(each.logger.name)
                _warn(
                    f"{each.logger.name} logs no more: {each.failed}. The run goes on, and metrics.jsonl has all of it"
                )

    # -- on a thread

    def _live(self) -> None:
        try:
            while not self._closing.wait(self._look_s):
                self._look()
            if not self._is_abandoned:
                self._look()
                self._finish()
        except OSError as error:  # such as a run folder that somebody has removed
            for each in self._loggers:
                each.failed = each.failed or why_of(error)
        finally:
            self._committed.close()
            for each in self._loggers:
                each.close()

    def _look(self) -> None:
        if not self._is_ours():
            return
        again = [self._again.popleft() for _ in range(len(self._again))]
        if again or self._committed.is_another():
            count = min(self._committed.open(), *again, LATEST)
            for each in self._loggers:
                each.open(count)
        for steps in self._committed.read():
            for each in self._loggers:
                each.take(steps)

    def _finish(self) -> None:
        last = self._committed.last()
        if self._is_ours() and not self._is_preempted:
            for each in self._loggers:
                each.take_last(last)

    def _is_ours(self) -> bool:
        return self._folder.writer is None or self._folder.writer.is_ours()


def _warn(text: str) -> None:
    warnings.warn(text, UnisonoWarning, stacklevel=3)
