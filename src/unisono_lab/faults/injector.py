"""Injects the faults of a plan into the workers that it names. A plugin: ``unisono_lab.faults.injector:begin``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import JobError
from unisono.failpoints import listen
from unisono_lab.faults.faults import OF_SOME, Fault, Faults, Join, KillCoordinator, Partition, Resize, Slow
from unisono_lab.faults.inject import inject

if TYPE_CHECKING:
    from unisono.train.group.workers import Workers
    from unisono.train.run import Run
    from unisono.train.step.step import Step

PLUGIN = "unisono_lab.faults.injector:begin"
SCRIPT = "UNISONO_FAULTS"
"""The variable that names the script."""

FOLDER = "faults"
"""In the run folder: an empty file for each fault that was injected."""

DUE = ".due"
"""Behind the number of a fault: a file that says that the next recovery is the one it waits for."""


def variables(plan: Path) -> dict[str, str]:
    """The variables by which workers inject the faults of a plan: what ``unisono run --faults`` gives them.

    Raises:
        JobError: the plan makes no sense.
    """
    Faults.read(plan)
    others = os.environ.get("UNISONO_PLUGINS")
    plugins = f"{others},{PLUGIN}" if others else PLUGIN
    return {"UNISONO_PLUGINS": plugins, SCRIPT: os.path.abspath(plan)}  # noqa: PTH100 (as for the run folder)


def begin(run: Run) -> None:
    """Listen to a run, and inject its faults.

    Raises:
        JobError: there is no script, or it makes no sense, or not for a job whose workers stay the same.
    """
    path = os.environ.get(SCRIPT)
    if not path:
        raise JobError(f"{PLUGIN} is in UNISONO_PLUGINS, and {SCRIPT} names no script: use unisono run --faults SCRIPT")
    faults = Faults.read(Path(path))
    if not run.inside.membership.is_elastic:
        _require_fixed(faults)
    FaultInjector(faults).attach(run)


def victim_of(fault: Fault, workers: int) -> int:
    """The rank of the worker that injects a fault. Faults that hit no worker are injected by the main worker."""
    return 0 if isinstance(fault, Join | Resize | KillCoordinator) else fault.rank % workers


class FaultInjector:
    """The faults that are still to be injected into one worker.

    Args:
        faults: the fault plan.
        inject: a function that injects a fault.
        victim: a function that returns the rank that a fault hits, among so many workers.
        sleep: a function that waits for so many seconds.
    """

    def __init__(
        self,
        faults: Faults,
        inject: Callable[[Fault, Run], None] = inject,
        victim: Callable[[Fault, int], int] = victim_of,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._do, self._victim, self._sleep = inject, victim, sleep
        numbered = dict(enumerate(faults.faults, 1))
        self._waiting = {number: fault for number, fault in numbered.items() if is_in_recovery(fault)}
        self._left = {number: fault for number, fault in numbered.items() if number not in self._waiting}
        self._slow: list[tuple[float, float]] = []  # factor, and the first step that is not slow any more

    def attach(self, run: Run) -> None:
        """Listen to the run."""
        run.on("step_begins", self._step_begins)
        if any(isinstance(fault, Slow) for fault in self._left.values()):
            run.on("step_computed", self._step_computed)
        if self._waiting:
            listen(partial(self._passes, run))

    def _step_begins(self, run: Run, step: Step) -> None:
        due = {number: fault for number, fault in self._left.items() if fault.at_step <= step.number}
        for number, fault in due.items():
            marker = run.dir / FOLDER / str(number)
            if self._hits(fault, run.inside.membership.workers) and _claim(marker):
                self._inject(number, fault, run, step.number)
            if marker.exists():
                del self._left[number]
        for number, fault in self._waiting.items():
            if fault.at_step <= step.number:  # on whomever: whoever joins has begun no step
                _claim(run.dir / FOLDER / f"{number}{DUE}")

    def _hits(self, fault: Fault, workers: Workers) -> bool:
        """Whether a fault is injected here: what is of no device in the first one."""
        device = getattr(fault, "device", 0) % workers.devices.count
        return self._victim(fault, workers.world_size) == workers.rank and device == workers.devices.rank

    def _passes(self, run: Run, point: str) -> None:
        """This worker passes a point in its code."""
        here = {number: fault for number, fault in self._waiting.items() if getattr(fault, "point", "") == point}
        for number, fault in here.items():
            marker, workers = run.dir / FOLDER / str(number), run.inside.membership.workers
            is_victim = point in OF_SOME or self._hits(fault, workers)
            if is_victim and marker.with_name(f"{number}{DUE}").exists() and _claim(marker):
                self._inject(number, fault, run, run.inside.collectives.step)
            if marker.exists():
                del self._waiting[number]

    def _inject(self, number: int, fault: Fault, run: Run, step: int) -> None:
        about: dict[str, Any] = {"number": number, "kind": fault.kind, "step": step, "rank": run.rank}
        about |= {"point": getattr(fault, "point", "")} if is_in_recovery(fault) else {}
        about |= {"generation": run.generation, "worker": os.environ.get("UNISONO_WORKER"), "pid": os.getpid()}
        run.inside.folder.journal("fault", **about)
        if isinstance(fault, Slow):
            end = float("inf") if fault.steps is None else fault.at_step + fault.steps
            self._slow.append((fault.factor, end))
        self._do(fault, run)

    def _step_computed(self, run: Run, step: Step) -> None:
        for factor, end in self._slow:
            if step.number < end:
                self._sleep((factor - 1) * step.computed_s)


def is_in_recovery(fault: Fault) -> bool:
    """Whether a fault waits for a recovery."""
    return getattr(fault, "during", "step") == "recovery"


def _require_fixed(faults: Faults) -> None:
    for number, fault in enumerate(faults.faults, 1):
        if isinstance(fault, Join | Resize | KillCoordinator | Partition) or is_in_recovery(fault):
            raise JobError(f"fault {number} ({fault.kind}) needs an elastic job: unisono run -n A:B, or --max-restarts")


def _claim(marker: Path) -> bool:
    """Whether this worker, and no other, is to inject a fault: each is injected once in a run folder."""
    try:
        marker.parent.mkdir(exist_ok=True)
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    except FileNotFoundError:  # somebody has removed the run folder: there is nowhere to note the fault
        return False
    return True
