"""A job whose workers come and go: what a person asks for, and what its end means. Nothing is done here."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError
from unisono.launch.elastic.entrance import Entrance
from unisono.launch.ending.outcome import NOT_MISSED, Blame, JobConclusion, WorkerExit, after_training
from unisono.launch.settings import LaunchSettings
from unisono.received import LONGEST_S

if TYPE_CHECKING:  # the command line starts without pydantic
    from unisono.membership.messages import JobOver

MAX_RESTARTS = 3
FAILURE_TIMEOUT_S = 300.0

SAME_EVENT_S = 2.0
"""Failures within this time are one event; the job has survived earlier ones."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers of workers that a job may have.

    Attributes:
        smallest: the smallest number of workers that train.
        largest: the largest number of workers.
    """

    smallest: int
    largest: int

    @classmethod
    def read(cls, text: str) -> Range:
        """``4``, or ``2:8``.

        Raises:
            JobError: the text is neither.
        """
        found = re.fullmatch(r"(-?\d{1,9})(?::(-?\d{1,9}))?", text.strip(), re.ASCII)
        if found is None:
            raise JobError(f"--workers {text}: write a number, such as 4, or a range, such as 2:8")
        smallest = int(found[1])
        return cls(smallest, int(found[2]) if found[2] else smallest)

    @property
    def is_fixed(self) -> bool:
        """Whether there is only one number in it."""
        return self.smallest == self.largest

    def within(self, number: int) -> int:
        """The number in the range that is nearest to another."""
        return max(self.smallest, min(self.largest, number))

    def __str__(self) -> str:
        return str(self.smallest) if self.is_fixed else f"{self.smallest}:{self.largest}"


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """The settings with which the workers of an elastic job run on this host.

    Attributes:
        launch: the script and the workers' environment; its number of workers is the most that this host may run.
        workers: the numbers of workers that the job may have, on all hosts together.
        begin_with: the number of workers to begin with; None for as many as the hosts can run.
        max_restarts: the number of new workers that each place of the job may get, on average.
        restart_on_error: whether a worker is replaced after an exception in its script, too.
        failure_timeout_s: the seconds of silence after which a worker, an agent or the coordinator counts as lost.
        entrance: the settings of the socket at which the coordinator listens.
    """

    launch: LaunchSettings
    workers: Range
    begin_with: int | None = None
    max_restarts: int = MAX_RESTARTS
    restart_on_error: bool = False
    failure_timeout_s: float = FAILURE_TIMEOUT_S
    entrance: Entrance = field(default_factory=Entrance)

    def with_devices(self, count: int | None) -> ElasticSettings:
        """The same, with workers of so many devices each."""
        return replace(self, launch=self.launch.with_options({"communication.devices_per_worker": count}))

    @property
    def has_default_timeout(self) -> bool:
        """Whether nobody has set ``failure_timeout_s``."""
        return self.failure_timeout_s == FAILURE_TIMEOUT_S

    def check(self, *, is_here: bool = True) -> None:
        """Refuse what cannot work, before anything is started.

        Args:
            is_here: whether the script is on this host.

        Raises:
            JobError: a number is out of range, or the script cannot be run; names it.
        """
        if self.workers.smallest < 1:
            raise JobError(f"--workers {self.workers}: at least 1 is needed")
        if self.workers.largest < self.workers.smallest:
            raise JobError(f"--workers {self.workers}: the smaller number comes first")
        if self.max_restarts < 0:
            raise JobError(f"--max-restarts {self.max_restarts}: needs a number of 0 or more")
        if not 0 < self.failure_timeout_s <= LONGEST_S:
            raise JobError(
                f"--failure-timeout-s {self.failure_timeout_s:g}: needs a number of seconds above 0, and at most "
                f"{LONGEST_S:g}"
            )
        self.launch.check(fewest=0, is_here=is_here)  # the coordinator's host may have none


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """The end of an agent elsewhere that the launcher has started.

    Attributes:
        agent: its id.
        where: its host or its node, in words.
        code: its exit code, which is that of its workers' scripts; None if it was killed or lost, and they with it.
    """

    agent: str
    where: str
    code: int | None


def conclusion_of(over: JobOver, elsewhere: Sequence[AgentEnd] = ()) -> JobConclusion:
    """How the launcher ends when the coordinator says that the job is over, and no worker of this host is to blame.

    Args:
        over: the coordinator's word.
        elsewhere: the ends of agents for which this launcher speaks, too.
    """
    if over.is_done:
        missed = _missed(over, elsewhere)
        return JobConclusion(0, over.reason) if missed is None else _failed_after_the_end(missed, over)
    if over.preempted:
        return JobConclusion(PREEMPTED, over.reason)
    codes = [each.code or 0 for each in elsewhere]  # 1 tells no more than that the job has failed
    return JobConclusion(next((code for code in codes if code > 1 and code != PREEMPTED), 1), over.reason)


def _missed(over: JobOver, elsewhere: Sequence[AgentEnd]) -> AgentEnd | None:
    """The end of an agent elsewhere for which a job has failed whose training is complete: see :func:`at_the_end`."""
    main = [each for each in elsewhere if each.agent == over.main_agent]
    others = [each for each in elsewhere if each.agent in over.agents and each.code is not None]
    return next((each for each in (*main, *others) if each.code not in (0, PREEMPTED)), None)


def _failed_after_the_end(missed: AgentEnd, over: JobOver) -> JobConclusion:
    if missed.code is None:
        words = f"the main worker was killed or lost on {missed.where} with its agent, after run.finish"
        return JobConclusion(FIRST_SIGNAL + signal.SIGKILL, words + after_training(over.digest))
    words = f"a script on {missed.where} has failed after run.finish (exit code {missed.code}): its lines above say why"
    return JobConclusion(missed.code, words + after_training(over.digest))


def lines_about(over: JobOver, elsewhere: Sequence[AgentEnd]) -> list[str]:
    """What people are told of agents elsewhere that are lost when training is complete, and not missed."""
    others = {*over.agents} - {over.main_agent}
    lost = [each for each in elsewhere if each.code is None and each.agent in others]
    return [f"an agent on {each.where} was killed or lost ({NOT_MISSED})" for each in lost]


def at_the_end(exits: Sequence[WorkerExit], over: JobOver) -> tuple[WorkerExit, ...]:
    """Those exits that count in a job whose training is complete.

    Workers that have finished run the script's last lines, each for itself. An error in them is one. A worker that is
    killed is missed only if it is the main one: of all others nobody expects that they stay. Whoever has not finished
    came too late or was not needed any more.
    """
    return tuple(
        each
        for each in exits
        if each.rank == over.main or (each.rank in over.finished and (each.code >= 0 or each.failure is not None))
    )


def telling(
    exits: Sequence[WorkerExit], over: JobOver | None, interrupted: int | None = None
) -> tuple[WorkerExit, ...]:
    """Those exits that tell how a job ended: the good ones, and of the others the last, which it has not survived.

    Where a worker's script has ended the job, what ended other workers without an error is nothing that it has not
    survived; and if that worker was one of another host, nobody here is to blame.
    """
    good = [each for each in exits if each.blame(interrupted) is Blame.NONE]
    failed = [each for each in exits if each.blame(interrupted) in (Blame.CAUSE, Blame.CONSEQUENCE)]
    if over is not None and over.worker:
        is_here = any(each.rank == over.worker for each in failed)
        failed = [each for each in failed if is_here and (each.failure is not None or each.rank == over.worker)]
    last = max((each.time for each in failed), default=0.0)
    return (*good, *(each for each in failed if each.time >= last - SAME_EVENT_S))
