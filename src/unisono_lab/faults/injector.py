"""Injects the faults of a plan into the workers that it names. A plugin: ``unisono_lab.faults.injector:begin``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from unisono.errors import JobError, LaunchError, UnisonoError
from unisono.failpoints import listen
from unisono.launch.elastic.address import WHERE, Address, Control
from unisono.membership.token import read_token
from unisono.settings.reading import Variables
from unisono.train.config.run_config import CoordinatorAccess
from unisono.train.model.at_rest import tensors_of
from unisono_lab.faults import fault_helper as fault_helper
from unisono_lab.faults import faults
from unisono_lab.faults.faults import (
    OF_SOME,
    Fault,
    Faults,
    FlippedPlace,
    Join,
    KillCoordinator,
    Partition,
    Resize,
    Slow,
)

if TYPE_CHECKING:
    from unisono.train.group.workers import Workers
    from unisono.train.run import Run
    from unisono.train.step.step import Step


def flip_in(run: Run, place: FlippedPlace, bit: int) -> None:
    """Flip a bit of the largest number of the first tensor in a place of this worker's memory.

    Raises:
        JobError: there is no tensor in that place.
    """
    tensors = [tensor for tensor in tensors_in(run, place) if tensor.numel() > 1]
    if not tensors:
        raise JobError(f"flip_bit: this worker holds no {place}")
    values = numbers_of(tensors[0])
    flip(values, int(values.double().abs().nan_to_num().argmax()), bit)


def flip_in_checkpoint(run: Run, bit: int) -> None:
    """Flip a bit of the weights' file of the newest checkpoint in the run folder.

    Raises:
        JobError: there is no checkpoint.
    """
    if run.inside.checkpoints.store is not None:
        run.inside.checkpoints.store.wait()  # a checkpoint may still be written
    newest = max(run.inside.folder.checkpoints.glob("step-*[0-9]/model.safetensors"), default=None)
    if newest is None:
        raise JobError(
            "flip_bit: there is no checkpoint yet: set checkpoints={'every': …}, or flip the bit at a later step"
        )
    flip_in_file(newest, bit)


def flip_in_file(path: Path, bit: int) -> None:
    """Flip a bit of a file that is not empty; the bit counts from its beginning, modulo its length."""
    data = bytearray(path.read_bytes())
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def tensors_in(run: Run, place: FlippedPlace) -> Sequence[Tensor]:
    """The tensors that this worker holds in a place now."""
    prepared = run.inside.trained.require_prepared()
    match place:
        case "weights":
            return [*prepared.parameters.values()]
        case "buffers":
            return [buffer.tensor for buffer in prepared.buffers]
        case "optimizer":
            return tensors_of(prepared.optimizers)
        case _:
            raise JobError(f"flip_bit: a worker holds no {place} between two steps")


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit, so that torch does not notice the write.

    Args:
        tensor: a dense tensor on the CPU.
        element: the number of the element, in the order of memory.
        bit: the number of the bit, from the lowest on, modulo the element's width.
    """
    values = numbers_of(tensor)
    bit %= 8 * values.itemsize
    values.view(torch.uint8).numpy()[element * values.itemsize + bit // 8] ^= 1 << bit % 8


def numbers_of(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of memory; writes to them do not change the tensor's version counter."""
    return tensor.data.as_strided((tensor.numel(),), (1,))


PATIENCE_S = 30.0
"""The seconds for which the coordinator may take to answer; many, since another fault may have hit it."""

PAUSE_S = 0.1


def inject(fault: Fault, run: Run) -> None:
    """Carry a fault out, now or later on a thread of its own. A slow worker is left to :class:`FaultInjector`."""
    match fault:
        case faults.Slow():
            pass
        case faults.FlipBit():
            _flip_bit(fault, run)
        case faults.WrongResult():
            _compute_wrongly(fault, run)
        case _ if fault.after_s or isinstance(fault, faults.Join | faults.Resize):
            # On a thread of its own, since joins and resizes wait for the coordinator's answer.
            threading.Thread(target=_later, args=(fault, run), name="unisono-fault", daemon=True).start()
        case _:
            _do(fault, run)


def _later(fault: Fault, run: Run) -> None:
    time.sleep(getattr(fault, "after_s", 0.0))
    try:
        _do(fault, run)
    except UnisonoError as error:
        run.inside.folder.journal("fault failed", kind=fault.kind, error=str(error))


def _do(fault: faults.Fault, run: Run) -> None:
    pid = os.getpid()
    match fault:
        case faults.Kill():
            os.kill(pid, signal.SIGKILL)
        case faults.Leave():
            os.kill(pid, signal.SIGTERM)
        case faults.Stop(for_s=for_s):
            if for_s is not None:
                _start_helper("continue", str(pid), for_s)
            os.kill(pid, signal.SIGSTOP)
        case faults.KillCoordinator(for_s=for_s):
            _kill_coordinator(run.dir, for_s)
        case faults.KillAgent():
            os.kill(_agent(), signal.SIGKILL)
        case faults.Join(workers=workers):
            _resize(more=workers)
        case faults.Resize(workers=workers):
            _resize(exactly=workers)
        case faults.Partition(for_s=for_s):
            run.inside.membership.cut_off(for_s)


def _start_helper(command: str, target: str, seconds: float) -> None:
    # In this worker's process group, so that it ends with the worker.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", fault_helper.__file__, command, target, str(seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise LaunchError(
            f"the process that should {command} another one ended at its start, with exit code {process.wait()}"
        )
    threading.Thread(target=process.wait, name="unisono-fault-helper", daemon=True).start()


def _kill_coordinator(run_dir: Path, seconds: float) -> None:
    path = str(run_dir / WHERE)
    if seconds:
        _start_helper("kill", path, seconds)
    elif (pid := fault_helper.coordinator_in(path)) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _agent() -> int:
    """The process id of the agent that started this worker, directly or through its fork server.

    Raises:
        JobError: that process is no ancestor of this one.
    """
    variables = Variables(os.environ)
    name = "UNISONO_AGENT_PID" if "UNISONO_AGENT_PID" in variables else "UNISONO_LAUNCHER_PID"
    pid = variables.count(name, "faults are injected into workers of unisono run")
    if pid not in {process.pid for process in psutil.Process().parents()}:
        raise JobError(f"the agent {pid} is no parent of this worker: start the worker with unisono run")
    return pid


def _resize(more: int = 0, exactly: int = 0) -> None:
    where = CoordinatorAccess.from_environ(os.environ)
    if where is None:
        raise JobError("a fault needs a coordinator: start an elastic job, with unisono run -n A:B")
    control = Control(Address(where.url, read_token(where.token_file), where.certificate))
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            status = {} if exactly else control.status()
            control.resize(exactly or min(int(status["wanted"]) + more, int(status["largest"])))
        except LaunchError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
        else:
            return


def _flip_bit(fault: faults.FlipBit, run: Run) -> None:
    if fault.place == "checkpoint":
        flip_in_checkpoint(run, fault.bit)
        return
    if fault.place in ("weights", "buffers", "optimizer"):
        flip_in(run, fault.place, fault.bit)
        return
    has_struck = False

    def witness(place: str, values: Tensor) -> None:
        nonlocal has_struck
        if place == fault.place and not has_struck:
            has_struck = True
            flip(values, 0, fault.bit)

    run.inside.exact.require_engine().witness = witness


def _compute_wrongly(fault: faults.WrongResult, run: Run) -> None:

    def wrong(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        flip(changed, 0, fault.bit)
        return changed

    prepared = run.inside.trained.prepared
    assert prepared is not None, "faults are injected into steps"
    next(iter(prepared.parameters.values())).register_hook(wrong)


PLUGIN = "unisono_lab.faults.injector:begin"
PLAN = "UNISONO_FAULTS"
"""The environment variable that names the fault plan."""

FOLDER = "faults"
"""The folder in the run folder that has an empty file for each injected fault."""

DUE = ".due"
"""The suffix of the file that says that a fault is to be injected in the next recovery."""


def variables(plan: Path) -> dict[str, str]:
    """The environment variables by which workers inject the faults of a plan; ``unisono run --faults`` sets them.

    Raises:
        JobError: the plan cannot be read, or makes no sense.
    """
    Faults.read(plan)
    others = os.environ.get("UNISONO_PLUGINS")
    plugins = f"{others},{PLUGIN}" if others else PLUGIN
    return {"UNISONO_PLUGINS": plugins, PLAN: os.path.abspath(plan)}  # noqa: PTH100 (as for the run folder)


def begin(run: Run) -> None:
    """Listen to a run, and inject its faults.

    Raises:
        JobError: there is no fault plan, it makes no sense, or it needs an elastic job.
    """
    path = os.environ.get(PLAN)
    if not path:
        raise JobError(f"{PLUGIN} is in UNISONO_PLUGINS, and {PLAN} names no fault plan: use unisono run --faults FILE")
    faults = Faults.read(Path(path))
    if not run.inside.membership.is_elastic:
        _require_fixed(faults)
    FaultInjector(faults).attach(run)


def victim_of(fault: Fault, workers: int) -> int:
    """The rank of the worker that injects a fault. Faults that hit no worker are injected by the main worker."""
    return 0 if isinstance(fault, Join | Resize | KillCoordinator) else fault.rank % workers


class FaultInjector:
    """The faults that are still to be injected into one worker.

    ``victim`` returns the rank that a fault hits, among a number of workers.
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
        self._slow: list[tuple[float, float]] = []  # the factor, and the first step that is no longer slow

    def attach(self, run: Run) -> None:
        """Inject faults into this run from now on."""
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
            if fault.at_step <= step.number:  # on every worker, since a joiner that will be hit has begun no step
                _claim(run.dir / FOLDER / f"{number}{DUE}")

    def _hits(self, fault: Fault, workers: Workers) -> bool:
        """Whether a fault is injected here; a fault that names no device is injected in the first one."""
        device = getattr(fault, "device", 0) % workers.devices.count
        return self._victim(fault, workers.world_size) == workers.rank and device == workers.devices.rank

    def _passes(self, run: Run, point: str) -> None:
        """Inject the faults that wait for this point, which the worker passes."""
        due = {number: fault for number, fault in self._waiting.items() if getattr(fault, "point", "") == point}
        for number, fault in due.items():
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
    """Claim a fault for this worker; returns whether it is the first. Each fault is injected once in a run folder."""
    try:
        marker.parent.mkdir(exist_ok=True)
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    except FileNotFoundError:  # the run folder was removed, so no fault can be recorded
        return False
    return True
