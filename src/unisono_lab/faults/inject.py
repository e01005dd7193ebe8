"""The injection of each kind of fault into the worker in which this runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from unisono.errors import JobError, LaunchError, UnisonoError
from unisono.launch.elastic.address import WHERE, Address, Control
from unisono.membership.token import read_token
from unisono.settings.variables import Variables
from unisono.train.config.run_config import CoordinatorAccess
from unisono_lab.faults import fault_helper as fault_helper
from unisono_lab.faults import faults

if TYPE_CHECKING:
    from torch import Tensor

    from unisono.train.run import Run

PATIENCE_S = 30.0
"""How long the coordinator may take to answer: another fault may have hit it."""

PAUSE_S = 0.1


def inject(fault: faults.Fault, run: Run) -> None:
    """Do it, now or, in a thread of its own, a little later. A slow worker is somebody else's business."""
    if isinstance(fault, faults.Slow):
        return
    if isinstance(fault, faults.FlipBit):
        _flip_bit(fault, run)
        return
    if isinstance(fault, faults.WrongResult):
        _compute_wrongly(fault, run)
        return
    if fault.after_s or isinstance(fault, faults.Join | faults.Resize):  # those wait for an answer
        threading.Thread(target=_later, args=(fault, run), name="unisono-fault", daemon=True).start()
    else:
        _do(fault, run)


def _later(fault: faults.Fault, run: Run) -> None:
    time.sleep(getattr(fault, "after_s", 0.0))
    try:
        _do(fault, run)
    except UnisonoError as error:
        run.inside.folder.journal("fault failed", kind=fault.kind, error=str(error))


def _do(fault: faults.Fault, run: Run) -> None:
    me = os.getpid()
    match fault:
        case faults.Kill():
            os.kill(me, signal.SIGKILL)
        case faults.Leave():
            os.kill(me, signal.SIGTERM)
        case faults.Stop(for_s=for_s):
            if for_s is not None:
                _help("continue", str(me), for_s)
            os.kill(me, signal.SIGSTOP)
        case faults.KillCoordinator(for_s=for_s):
            _kill_coordinator(run.dir, for_s)
        case faults.KillAgent():
            os.kill(_agent(), signal.SIGKILL)
        case faults.Join(workers=workers):
            _ask(more=workers)
        case faults.Resize(workers=workers):
            _ask(exactly=workers)
        case faults.Partition(for_s=for_s):
            run.inside.membership.cut_off(for_s)


def _help(what: str, whom: str, seconds: float) -> None:
    # In this worker's process group: whoever ends the worker ends what it has started.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", fault_helper.__file__, what, whom, str(seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise LaunchError(
            f"the process that is to {what} another one ended before it began, with code {process.wait()}"
        )
    threading.Thread(target=process.wait, name="unisono-fault-helper", daemon=True).start()


def _kill_coordinator(run_dir: Path, seconds: float) -> None:
    path = str(run_dir / WHERE)
    if seconds:
        _help("kill", path, seconds)
    elif (pid := fault_helper.named_in(path)) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _agent() -> int:
    """The process that has started this one, directly or through its fork server.

    Raises:
        JobError: it is not above this process.
    """
    variables = Variables(os.environ)
    name = "UNISONO_AGENT_PID" if "UNISONO_AGENT_PID" in variables else "UNISONO_LAUNCHER_PID"
    named = variables.count(name, "faults are injected into workers of unisono run")
    if named not in {process.pid for process in psutil.Process().parents()}:
        raise JobError(f"the agent {named} is not above this worker: start it with unisono run")
    return named


def _ask(more: int = 0, exactly: int = 0) -> None:
    where = CoordinatorAccess.from_environ(os.environ)
    if where is None:
        raise JobError("a fault needs a coordinator: start an elastic job, with unisono run -n A:B")
    control = Control(Address(where.url, read_token(where.token_file), where.certificate))
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            control.resize(exactly or _possible(control, more))
        except LaunchError:
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE_S)
        else:
            return


def _possible(control: Control, more: int) -> int:
    status = control.status()
    return min(int(status["wanted"]) + more, int(status["largest"]))


def _flip_bit(fault: faults.FlipBit, run: Run) -> None:
    from unisono_lab.faults.flip import flip, flip_in, flip_in_checkpoint

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
    from unisono_lab.faults.flip import flip

    def wrong(gradient: Tensor) -> Tensor:
        found = gradient.clone()
        flip(found, 0, fault.bit)
        return found

    prepared = run.inside.trained.prepared
    assert prepared is not None, "faults are injected into steps"
    next(iter(prepared.parameters.values())).register_hook(wrong)
