"""Whole scripts on workers that are threads of this process: they come, go and are killed at points of their steps.

All of a worker is the real thing, from ``unisono.init`` on, save the coordinator and the transport, which are those of
``one_at_a_time``: a job of three workers costs about what one of one worker costs, and happens alike each time.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest
import torch

from one_at_a_time import Blow, Killed, SimulatedMembership, Worker, World
from torch_settings import TorchSettings
from unisono.data.generators import generators_kept
from unisono.errors import UnisonoWarning
from unisono.host.process import ScriptEnd
from unisono.job import Job
from unisono.train.config.run_config import Connection
from unisono.train.plugins import Event
from unisono.train.run import Run
from unisono.train.start import HOST_PROCESS, HostProcess
from unisono.train.state.ending import LeaveRequest
from unisono.train.step.step import Step
from unisono_lab.faults.injector import flip_in

MOST_THREADS = 64
THREADS = "worker"
"""What their names begin with."""

OF_THIS_RUN = (
    "generation",
    "world_size",
    "seconds",
    "samples_per_s",
    "workers",
    "links",
    "setting",
    "recovered",
    "time",
    "shard_s",
)
"""What lines of metrics say of the workers, and not of the job."""


@dataclass(frozen=True)
class Kill:
    """Whoever has a rank is killed, once.

    Attributes:
        step: as soon as it begins one that is not before this one.
        rank: counted around if there are fewer workers.
        points: that it passes before; those of a step and of all that follows.
    """

    step: int
    rank: int
    points: int = 0


@dataclass(frozen=True)
class Flip:
    """A bit flips in a weight of whoever has a rank, once.

    Attributes:
        step: as soon as the moment comes in one that is not before this one.
        moment: of a step, as ``Run.on`` knows them.
        rank: counted around if there are fewer workers.
    """

    step: int
    moment: Event = "step_begins"
    rank: int = 0


@dataclass
class Done:
    """What a job has left.

    Attributes:
        folder: of its run.
        world: in which it ran.
        printed: by all its workers.
    """

    folder: Path
    world: ScriptWorld
    printed: str = ""

    @property
    def said(self) -> list[str]:
        """What the script printed on the main worker at the end of each epoch, and at its end."""
        lines = re.findall(r"(?:epoch \d+: .*|after .*)", self.printed)
        return sorted({re.sub(r" on \d+$", "", line) for line in lines})

    @property
    def digest(self) -> str:
        """Of the weights."""
        return str(json.loads((self.folder / "result.json").read_text())["weights_sha256"])

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """What lines of metrics say of the job, by step."""
        return self.metrics_in(self.folder)

    @staticmethod
    def metrics_in(folder: Path) -> dict[int, dict[str, Any]]:
        """The same of any folder."""
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: {name: line[name] for name in line if name not in OF_THIS_RUN} for line in lines}

    @property
    def decided(self) -> list[list[Any]]:
        """Step, policy, verb, value and reason; a main worker that takes over may say again what the one before did."""
        seen = {json.dumps([one[name] for name in DECISION]) for one in self.journal("decided")}
        return sorted(map(json.loads, seen))

    @property
    def outcome(self) -> tuple[str, dict[int, dict[str, Any]], list[list[Any]]]:
        """All that is to be the same whatever happens to the workers."""
        return self.digest, self.metrics, self.decided

    def journal(self, event: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        lines = [json.loads(line) for line in (self.folder / "journal.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


DECISION = ("step", "policy", "verb", "value", "why")


class ScriptWorld(World):
    """A world whose workers are as many as somebody asks for; whoever is killed is replaced.

    Attributes:
        formed: the workers of each generation, by rank.
        flips: those that are still to come.
    """

    def __init__(
        self,
        script: Callable[[Any], None],
        shards: int,
        workers: range,
        kills: Sequence[Kill],
        flips: Sequence[Flip] = (),
    ) -> None:
        super().__init__(script, workers.start, 0, ())
        self._names = (f"w{number:03}" for number in itertools.count(1))
        self.shards, self.most, self.wanted = shards, workers.stop - 1, workers.start
        self.formed: list[Sequence[str]] = []
        self._kills, self._doomed, self.flips = deque(kills), dict[str, int](), deque(flips)
        self._pool: ThreadPoolExecutor

    def run(self, pool: ThreadPoolExecutor) -> World:
        self._pool = pool
        return super().run(pool)

    def pass_point(self, name: str) -> None:
        victim = self._running
        if victim is None or not threading.current_thread().name.startswith(THREADS):
            return  # what writes checkpoints, beside the workers
        if (left := self._doomed.get(victim.name)) is not None:
            self._doomed[victim.name] = left - 1
            if left == 0:
                self.kill()
        super().pass_point(name)

    def place(self, worker: Worker, *, joins: bool) -> SimulatedMembership:
        return ScriptMembership(self, worker, joins=joins)

    def step_begins(self, run: Run, step: Step) -> None:
        """Whoever is to be killed in it will be."""
        if self._kills and self._kills[0].step <= step.number and self._kills[0].rank % run.world_size == run.rank:
            assert self._running is not None
            self._doomed[self._running.name] = self._kills.popleft().points

    def flip(self, moment: Event, run: Run, step: Step) -> None:
        """A bit flips if it is to."""
        due = self.flips[0] if self.flips else None
        if due and due.moment == moment and due.step <= step.number and due.rank % run.world_size == run.rank:
            self.flips.popleft()
            flip_in(run, "weights", 12)

    def kill(self) -> NoReturn:
        """The worker that runs is killed."""
        victim = self._running
        assert victim is not None
        self._doomed.pop(victim.name, None)
        victim.phase = "gone"
        self._staff()
        others = [] if victim.group is None else [name for name in victim.group.names if name != victim.name]
        # Never one alone: its state would be computed again, and the body's prints say so. See test_struck_runs.
        self._strike(victim, Blow(victim.name, 0, frozenset(others[::2] if len(others) > 2 else others)))

    def resize(self, workers: int) -> None:
        """So many are wanted: others come, or those of the lowest ranks leave."""
        self.wanted = min(workers, self.most)
        self._staff()

    def replace(self, name: str) -> None:
        """It leaves, and another one comes."""
        self.replaced.add(name)
        self._staff()

    def _staff(self) -> None:
        alive = [one for one in self._all if one.is_alive and one.name not in self.replaced]
        members = [one for one in alive if one in self._members and one.phase != "joins"]
        if len(alive) > self.wanted:
            self.replaced |= {one.name for one in members[: max(0, len(members) - self.wanted)]}
        for _ in range(self.wanted - len(alive)):
            self._begin(self._pool, joins=self.group is not None)

    def _form_next(self) -> bool:
        before = self.group
        found = super()._form_next()
        if self.group is not None and self.group is not before:
            self.formed.append(self.group.names)
        return found


class ScriptMembership(SimulatedMembership):
    """A worker's place in such a world."""

    world: ScriptWorld

    def resize(self, workers: int) -> None:
        self.world.resize(workers)

    def leave(self) -> bool:
        self.world.replace(self.worker.name)
        return True

    def replace(self, generation: int, rank: int) -> None:
        group = self.worker.group
        assert group is not None
        if group.number == generation:
            self.world.replace(group.names[rank])


class WorkerThread(HostProcess):
    """What a run takes from a worker that is a thread.

    Args:
        place: of the worker in its world.

    Attributes:
        leave: notes that it is asked to leave.
    """

    def __init__(self, place: ScriptMembership) -> None:
        super().__init__(ScriptEnd(is_told=True))
        self._place = place
        self.leave = LeaveRequest()

    def apply_numerics(self, job: Job, device: torch.device) -> Callable[[], None]:
        """As in a process; nothing is put back when a single worker ends, as long as other workers compute."""
        super().apply_numerics(job, device)
        return lambda: None

    def membership(self, *_: Any, **__: Any) -> ScriptMembership:
        """Its place, instead of one that the coordinator gives."""
        return self._place

    def leave_request(self, connection: Connection) -> LeaveRequest:
        """The one that ``Scene.kill`` knows."""
        return self.leave

    def note_run(self, run: Run) -> None:
        """It is closed when the script ends."""
        assert run.job.shards == self._place.world.shards
        run.on("step_begins", self._place.world.step_begins)
        for moment in get_args(Event):
            run.on(moment, partial(self._place.world.flip, moment))
        self.newest = run


class Scene:
    """A script, and where it stands on each worker.

    Args:
        script: that all of them run.
        arguments: its own.
    """

    def __init__(self, script: Path, arguments: Sequence[str]) -> None:
        self._code = compile(script.read_text(), str(script), "exec")
        self.argv = [str(script), *arguments]
        self._kill = os.kill
        self.world: ScriptWorld

    def work(self, membership: ScriptMembership) -> None:
        """One worker."""
        HOST_PROCESS.set(thread := WorkerThread(membership))
        if keras := sys.modules.get(
            "keras.src.backend.common.global_state"
        ):  # a worker before it counted names up here
            vars(keras.GLOBAL_STATE_TRACKER).clear()
        try:
            exec(self._code, {"__name__": "__main__", "__file__": self.argv[0]})  # noqa: S102 (what this is for)
            thread.script_end.reached()
        except Killed:
            if thread.newest is not None:
                thread.newest.inside.log_follower.abandon()
            raise
        finally:
            if thread.newest is not None:
                thread.newest.close()

    def kill(self, pid: int, number: int) -> None:
        """As ``os.kill``, for scripts whose workers kill themselves, or ask themselves to leave."""
        thread = HOST_PROCESS.get()
        if pid != os.getpid() or not isinstance(thread, WorkerThread):
            self._kill(pid, number)
        elif number == signal.SIGKILL:
            self.world.kill()
        else:
            assert number == signal.SIGTERM
            thread.leave.ask()


class Cluster:
    """Runs scripts.

    Args:
        folder: below which each job has its run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()

    def __call__(
        self,
        script: Path,
        workers: int | tuple[int, int],
        *,
        shards: int,
        arguments: Sequence[str] = (),
        kills: Sequence[Kill] = (),
        flips: Sequence[Flip] = (),
        folder: Path | None = None,
        **settings: str,
    ) -> Done:
        """Run one to its end.

        Args:
            script: what trains.
            workers: how many; or how many at first, and at most.
            shards: of its job.
            arguments: its own.
            kills: in the order in which they are to happen.
            flips: likewise.
            folder: of the run; by default a new one.
            settings: environment variables.
        """
        folder = folder or self._folder / f"run-{next(self._numbers)}"
        first, most = (workers, workers) if isinstance(workers, int) else workers
        scene = Scene(script, arguments)
        scene.world = ScriptWorld(scene.work, shards, range(first, most + 1), kills, flips)
        variables = {"UNISONO_RUN_DIR": str(folder), "UNISONO_OVERLAP": "0", **settings}
        printed = io.StringIO()
        with set_up(scene, variables), redirect_stdout(printed), ThreadPoolExecutor(MOST_THREADS, THREADS) as pool:
            scene.world.run(pool)
        return Done(folder, scene.world, printed.getvalue())


@contextmanager
def set_up(scene: Scene, variables: Mapping[str, str]) -> Iterator[None]:
    """Runs begin in the scene's world; what they set for the whole process is put back when all of them have ended."""
    torch_settings = TorchSettings()
    before = torch_settings.look()
    with pytest.MonkeyPatch.context() as patch, generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnisonoWarning)
        patch.setattr(sys, "argv", scene.argv)
        patch.setattr(sys, "excepthook", sys.excepthook)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(os, "kill", scene.kill)
        patch.setattr(os, "fsync", os.fsync)  # a script may set another one
        try:
            yield
        finally:
            torch_settings.restore(before)
