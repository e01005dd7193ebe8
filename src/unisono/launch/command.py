"""The command and the environment of each worker, decided without starting anything."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unisono.host.machine import LEVEL, numerics_variables
from unisono.launch.settings import LaunchSettings
from unisono.settings.reading import variables_of

PER_WORKER = (
    *("UNISONO_RANK", "UNISONO_WORLD_SIZE", "UNISONO_LOCAL_RANK", "UNISONO_LOCAL_WORLD_SIZE", "UNISONO_STORE"),
    *("UNISONO_STORE_FD", "UNISONO_COORDINATOR", "UNISONO_TOKEN_FILE", "UNISONO_CERTIFICATE", "UNISONO_WORKER"),
    *("UNISONO_AGENT_PID", "UNISONO_TERM", "UNISONO_FAILURE_TIMEOUT_S", "UNISONO_TERMINAL", "UNISONO_CORES"),
)
"""What a launcher started by another launcher's worker would inherit, and hand on to workers of its own."""


@dataclass(frozen=True, slots=True)
class RendezvousSocket:
    """The listening socket on loopback at which the workers of one launch meet; the launcher opened it for rank 0."""

    port: int | str
    fd: int | str


@dataclass(frozen=True, slots=True)
class ElasticSeat:
    """The id of an elastic job's worker, and the way to its coordinator; one of these for each of its devices.

    Attributes:
        place: a number below the host's most workers that no other running worker of the host has.
        certificate: the certificate to trust; None for those that the system trusts, or without TLS.
        rendezvous: the socket at which the worker's devices meet; None for a worker of one device.
    """

    worker: str
    place: int
    coordinator: str
    token_file: Path
    certificate: Path | None = None
    device: int = 0
    devices: int = 1
    rendezvous: RendezvousSocket | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell the worker all of this."""
        certificate = {} if self.certificate is None else {"UNISONO_CERTIFICATE": os.path.abspath(self.certificate)}  # noqa: PTH100
        return {
            "UNISONO_COORDINATOR": self.coordinator,
            "UNISONO_TOKEN_FILE": os.path.abspath(self.token_file),  # noqa: PTH100 (as for the run folder)
            "UNISONO_WORKER": self.worker,
            "UNISONO_LOCAL_RANK": str(self.place * self.devices + self.device),
            **certificate,
            **self._device_variables,
        }

    @property
    def _device_variables(self) -> dict[str, str]:
        """The variables of one of several devices: the devices of a worker meet as the workers of a fixed job do."""
        if self.devices == 1:
            return {}
        return {
            "UNISONO_RANK": str(self.device),
            "UNISONO_WORLD_SIZE": str(self.devices),
            "UNISONO_LOCAL_WORLD_SIZE": str((self.place + 1) * self.devices),
            **_store_variables(self.rendezvous, self.device),
        }


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The command and the environment of a worker that is to be started.

    Attributes:
        script: the script and its arguments, as ``unisono.launch.worker`` takes them.
        variables: the variables that it gets on top of the launcher's own environment.
    """

    script: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def argv(self) -> tuple[str, ...]:
        """The words of the command."""
        # -P keeps the current folder off the path until the bootstrap has put there what the script expects.
        return (sys.executable, "-P", "-u", "-m", "unisono.launch.worker", *self.script)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The worker's whole environment."""
        return {name: value for name, value in base.items() if name not in PER_WORKER} | dict(self.variables)

    def __str__(self) -> str:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        return f"{variables} {shlex.join(self.argv)}"


def worker_command(
    settings: LaunchSettings, run_dir: Path, rank: int, rendezvous: RendezvousSocket | None
) -> WorkerCommand:
    """How to start the worker of a rank. A job of one worker has no ``rendezvous``."""
    own = {
        "UNISONO_RANK": str(rank),
        "UNISONO_WORLD_SIZE": str(settings.processes),
        "UNISONO_LOCAL_RANK": str(rank),
        "UNISONO_LOCAL_WORLD_SIZE": str(settings.processes),
    }
    store = _store_variables(rendezvous, rank)
    variables = own | _common_variables(settings, run_dir) | store | settings.extra_environment
    return WorkerCommand(tuple(settings.script.argv), variables)


def elastic_command(settings: LaunchSettings, run_dir: Path, seat: ElasticSeat | None) -> WorkerCommand:
    """How to start a worker that joins through the coordinator; without a seat, what all of them have in common."""
    own = {} if seat is None else seat.variables
    variables = own | _common_variables(settings, run_dir) | settings.extra_environment
    return WorkerCommand(tuple(settings.script.argv), variables)


def _common_variables(settings: LaunchSettings, run_dir: Path) -> dict[str, str]:
    threads, options = str(settings.threads), variables_of(settings.options)
    return {
        "UNISONO_RUN_DIR": os.path.abspath(run_dir),  # noqa: PTH100 (resolve() would follow the user's links)
        "UNISONO_LAUNCHER_PID": str(os.getpid()),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Without it each process, and each run that resumes, iterates sets of strings in an order of its own.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        **settings.tuning.variables,
        **numerics_variables(options.get(LEVEL) or os.environ.get(LEVEL)),
        **options,
    }


def _store_variables(rendezvous: RendezvousSocket | None, rank: int) -> dict[str, str]:
    if rendezvous is None:
        return {}
    socket = {"UNISONO_STORE_FD": str(rendezvous.fd)} if rank == 0 else {}
    return {"UNISONO_STORE": f"127.0.0.1:{rendezvous.port}", **socket}


def _as_typed(command: WorkerCommand) -> str:
    """A command as a person would type it, without the launcher's process id, which is another in every launch."""
    variables = {name: value for name, value in command.variables.items() if name != "UNISONO_LAUNCHER_PID"}
    return str(WorkerCommand(command.script, variables))


def dry_run(settings: LaunchSettings, run_dir: Path) -> str:
    """The command of each worker of a job, one below the other, for a person to read."""
    rendezvous = RendezvousSocket("PORT", "FD") if settings.processes > 1 else None
    lines = ["# PORT and FD are those of a socket on loopback that the launcher opens"] if rendezvous else []
    lines += [f"# {line}" for line in settings.tuning.lines]
    for rank in range(settings.processes):
        lines += [f"# rank {rank}", _as_typed(worker_command(settings, run_dir, rank, rendezvous))]
    return "\n".join(lines)


def elastic_dry_run(settings: LaunchSettings, run_dir: Path) -> str:
    """The command with which each worker of an elastic job would be started, for a person to read."""
    lines = ["# PORT is the coordinator's, on loopback; workers are w1, w2 …, with a place of their own each"]
    lines += [f"# {line}" for line in settings.tuning.lines]
    devices = settings.devices
    rendezvous = RendezvousSocket("MEETING", "FD") if devices > 1 else None
    if rendezvous is not None:
        lines.append("# MEETING and FD are those of a socket on loopback that is opened for the devices of each worker")
    for device in range(devices):
        seat = ElasticSeat("w1", 0, "http://127.0.0.1:PORT", run_dir / "token", None, device, devices, rendezvous)
        lines.append(_as_typed(elastic_command(settings, run_dir, seat)))
    return "\n".join(lines)
