"""The settings of a launch, as values: the script or module to run, and how."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path

from unisono.errors import JobError
from unisono.launch.notices.source import NoticeSource
from unisono.launch.pinning.pins import Pinning
from unisono.launch.tuning import Tuning
from unisono.loggers.named import require_loggers
from unisono.received import LONGEST_S
from unisono.sync.named import strategy_of


@dataclass(frozen=True, slots=True)
class Script:
    """A script by its path, or a module by its name, and the arguments that are its own.

    Attributes:
        target: the path as the user gave it, or a module's dotted name.
        args: what follows it, untouched.
        is_module: whether ``target`` names a module.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> "Script":
        """The inverse of ``argv``."""
        if argv[0] == "-m":
            return cls(argv[1], tuple(argv[2:]), is_module=True)
        return cls(argv[0], tuple(argv[1:]))

    @property
    def argv(self) -> list[str]:
        """The script as arguments, the way Python itself takes them."""
        return [*(["-m"] if self.is_module else []), self.target, *self.args]

    @property
    def stem(self) -> str:
        """A short name for folders: ``train`` for ``scripts/train.py`` and for ``package.train``."""
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).resolve().stem

    def require_readable(self) -> None:
        """Refuse what Python could not run, before any worker starts.

        Raises:
            JobError: there is no such script or module, or it cannot be read; names it.
        """
        if self.is_module:
            _require_module(self.target)
        else:
            _require_file(Path(self.target))


def _require_file(path: Path) -> None:
    try:
        if path.is_dir():
            if not (path / "__main__.py").is_file():
                raise JobError(f"{path} is a folder without a __main__.py: name the script in it that trains")
            return
        path.open("rb").close()
    except FileNotFoundError:
        raise JobError(f"there is no script {path} (looked from {Path.cwd()})") from None
    except OSError as error:
        raise JobError(f"the script {path} cannot be read: {error.strerror}") from error


def _require_module(name: str) -> None:
    # Only the outermost package is looked for: finding what is inside it would import it here.
    outermost = name.partition(".")[0]
    found = outermost in sys.builtin_module_names or PathFinder.find_spec(outermost, [os.getcwd(), *sys.path])  # noqa: PTH109
    if not found:
        raise JobError(f"there is no module {name} (looked in {Path.cwd()} and the installed packages)")


@dataclass(frozen=True, slots=True)
class Size:
    """How many workers a job has, and of how many devices each.

    Attributes:
        workers: the number of workers.
        devices: the number of devices of each worker.
    """

    workers: int
    devices: int = 1

    @property
    def processes(self) -> int:
        """The number of processes: one for each device of each worker."""
        return self.workers * self.devices

    def __str__(self) -> str:
        """``1 worker``, ``3 workers of 2 devices``."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return workers if self.devices == 1 else f"{workers} of {self.devices} devices"


MOST_WORKERS = 4096
"""That one host offers to a coordinator."""

GRACE_S = 30.0
"""How long workers that were asked to leave may take, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The settings with which the workers of one job start on this host.

    Attributes:
        script: the script or module that each worker runs.
        workers: the number of workers on this host.
        devices_per_worker: the devices of each worker, each driven by a process, if the person sets them here.
        run_dir: the run folder; None makes a new one below ``runs``.
        shards: the job's shards, if the person sets them here.
        threads: torch threads of each worker, if the person sets them here.
        checkpoint_every: steps between checkpoints, if the person sets them here.
        policies: policies by name, besides the script's; the workers find out whether modules of them are there.
        numerics: the level of numerics, if the person sets it here.
        strategy: the strategy by which the workers synchronise, if the person sets it here.
        log_to: loggers by name, besides the script's; the workers find out whether modules and packages are there.
        audit: the share of the work that is computed twice, if the person sets it here.
        allow_job_change: whether a resumed job may differ from the checkpoint's.
        insecure_data: whether workers of several hosts may speak plain text with each other.
        timeline: whether workers write down what they do when.
        profile: the steps in which torch's profiler runs, as ``FIRST:LAST``, if any.
        grace_s: seconds that workers may take to leave after the first Ctrl-C or SIGTERM.
        notices: the cloud that says when it takes this machine away, by its name; None for none.
        tuning: the settings of the workers' memory allocator.
        pin: whether workers are pinned to cores; None pins them to NUMA nodes, where there are several.
        warm_start: whether several workers are forked from a process that has torch loaded, where that is possible.
        extra_environment: further variables for every worker.
        memory_limit_mib: the most memory of the host that each worker may need, with its loader processes, in MiB; a
            worker that needs more is ended. None does not look.
    """

    script: Script
    workers: int = 1
    devices_per_worker: int | None = None
    run_dir: Path | None = None
    shards: int | None = None
    threads: int | None = None
    checkpoint_every: int | None = None
    policies: tuple[str, ...] = ()
    numerics: str | None = None
    strategy: str | None = None
    log_to: tuple[str, ...] = ()
    audit: float | None = None
    allow_job_change: bool = False
    insecure_data: bool = False
    timeline: bool = False
    profile: str | None = None
    grace_s: float = GRACE_S
    notices: str | None = None
    tuning: Tuning = field(default_factory=Tuning)
    pin: bool | None = None
    warm_start: bool = True
    extra_environment: dict[str, str] = field(default_factory=dict)
    memory_limit_mib: float | None = None

    @property
    def processes(self) -> int:
        """The number of processes on this host: one for each device of each worker."""
        return self.workers * (self.devices_per_worker or 1)

    @property
    def pinning(self) -> Pinning:
        """Whether and how the workers are pinned on this host."""
        return Pinning.of_this_host(self.pin, self.threads or 1)

    @property
    def notice_source(self) -> NoticeSource | None:
        """The address at which the cloud says so; None if nobody listens.

        Raises:
            JobError: there is no such cloud, or a variable names no address.
        """
        return None if self.notices is None else NoticeSource.of_environment(self.notices, os.environ)

    def told(self, variables: Mapping[str, str]) -> "LaunchSettings":
        """The same, with further variables for every worker."""
        return replace(self, extra_environment={**self.extra_environment, **variables})

    def check(self, fewest: int = 1, *, is_here: bool = True) -> None:
        """Refuse what cannot work, before anything is started.

        Args:
            fewest: the smallest number of workers that this host may have.
            is_here: whether the script is on this host.

        Raises:
            JobError: a number is out of range, or the script cannot be run; names it.
        """
        for name in ("workers", "devices_per_worker", "shards", "threads", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < (fewest if name == "workers" else 1):
                raise JobError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
        if self.processes > MOST_WORKERS:
            raise JobError(f"--workers {self.workers}: at most {MOST_WORKERS} on one host")
        if not 0 <= self.grace_s <= LONGEST_S:
            raise JobError(f"--grace-s {self.grace_s:g}: needs a number of seconds, 0 or more, at most {LONGEST_S:g}")
        if self.shards is not None and self.workers > self.shards:
            raise JobError(
                f"--workers {self.workers} with --shards {self.shards}: every worker needs at least one shard; "
                f"set --shards {self.workers}, or start at most {self.shards} workers"
            )
        _ = self.notice_source
        if self.strategy is not None:
            strategy_of(self.strategy)
        if self.policies:
            from unisono.adapt.named import require_policies  # loads numpy, whose thread no fork server may have

            require_policies(self.policies, "--policy")
        require_loggers(self.log_to, "--log-to")
        if is_here:
            self.script.require_readable()
