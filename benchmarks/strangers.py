"""Strangers beside a job: ten thousand connections that lead nowhere, to whatever listens on its hosts."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.elastic_job import PROGRAM, Job, launched, running
from benchmarks.figures import Ratio, times_as_fast
from benchmarks.link import Link
from benchmarks.report import Grid

ROOT = Path(__file__).parents[1]


class Strangers:
    """The process of ``programs/strangers.py``."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def begin(self, calls: int, over_s: float) -> None:
        """Have them call so often, spread over that time; :meth:`ended` waits for it."""
        self._tell(calls=calls, over_s=over_s)

    def ended(self) -> dict[str, Any]:
        """Wait until they have called: ``calls``; ``taken`` and ``replayed``, by address; and ``held``."""
        assert self._process.stdout is not None
        found = json.loads(self._process.stdout.readline())
        assert isinstance(found, dict)
        return found

    def hang_up(self) -> None:
        """Have them let go of all connections."""
        self._tell(hang_up=True)
        self.ended()

    def have_overheard(self) -> bool:
        """Whether they know what a worker has said to another one."""
        self._tell()
        return bool(self.ended()["overheard"])

    def _tell(self, **told: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()


@contextmanager
def strangers(enter: Sequence[str], interface: str, listening: Mapping[str, int]) -> Iterator[Strangers]:
    """As long as the context lasts.

    Args:
        enter: what goes before the command, so that it runs on a host.
        interface: of that host, over which workers call each other.
        listening: by address, a process in the network of each host that is called.
    """
    command = [*enter, sys.executable, "-m", "benchmarks.programs.strangers"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        found = Strangers(process)
        try:
            found._tell(listening=listening, interface=interface)
            found.ended()
            yield found
        finally:
            process.kill()


# -- what they cost a job


@dataclass(frozen=True, slots=True)
class Siege:
    """A job of two hosts, in peace and among strangers by turns.

    Attributes:
        calls: of all turns together; 0 to leave them out.
        turns: each with and without strangers.
        turn_s: seconds of each.
        model: a name in ``WORKLOADS``.
    """

    calls: int = 10_000
    turns: int = 5
    turn_s: float = 8.0
    model: str = "narrow"


@dataclass(frozen=True, slots=True)
class Besieged:
    """What was found.

    Attributes:
        calls: of strangers.
        in_peace: seconds of a step, for each turn.
        among_strangers: likewise.
        lost: how many workers were lost.
    """

    calls: int
    in_peace: list[float]
    among_strangers: list[float]
    lost: int

    @property
    def ratio(self) -> Ratio:
        """How many times as long a step takes among strangers."""
        return times_as_fast(self.in_peace, self.among_strangers)

    def grid(self) -> Grid:
        """For the screen."""
        times = [f"{1000 * statistics.median(each):.1f} ms" for each in (self.in_peace, self.among_strangers)]
        return Grid(
            f"a job of two hosts over TLS beside {self.calls} connections of strangers, who run on the same processors",
            ("step in peace", "among strangers", "times as long (95 % interval)", "workers lost"),
            [(*times, f"{self.ratio:.2f}", str(self.lost))],
        )


def besieged(siege: Siege, link: Link) -> Besieged:
    """Train on two hosts, and have strangers call from one of them."""
    first, second = link.hosts
    program = [*PROGRAM, siege.model, "2"]
    where = ["-n", "2", "--here", "1", "--coordinator", f"{first.address}:0"]
    in_peace, among_strangers, calls = [], [], 0
    with running(where, program, enter=first.enter) as job:
        job.until((job.folder / "coordinator.json").exists, "a coordinator")
        join = ["-m", "unisono", "join", "--run-dir", str(job.folder), *program]
        with launched(join, {}, job.folder, enter=second.enter) as joined:
            assert job.launcher is not None
            assert joined.launcher is not None
            listening = {first.address: job.launcher.pid, second.address: joined.launcher.pid}
            with strangers(second.enter, second.interface, listening) as crowd:
                (worker, *_) = job.await_calm(2)
                for _ in range(siege.turns):
                    in_peace.append(_step_s(job, worker, siege.turn_s))
                    crowd.begin(siege.calls // siege.turns, siege.turn_s)
                    among_strangers.append(_step_s(job, worker, siege.turn_s))
                    calls += crowd.ended()["calls"]
                    crowd.hang_up()
                return Besieged(calls, in_peace, among_strangers, len(job.journal("lost")))


def _step_s(job: Job, worker: str, seconds: float) -> float:
    begun = time.time()
    time.sleep(seconds)
    commits = [at for _, at in job.commits(worker) if at >= begun]
    return statistics.median(later - at for at, later in pairwise(commits))
