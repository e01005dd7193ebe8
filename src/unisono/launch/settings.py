"""The settings of a launch, as values: the script or module to run, and how."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unisono.errors import JobError
from unisono.job import shards_of_workers
from unisono.launch.pins import Pinning
from unisono.launch.tuning import Tuning
from unisono.loggers.by_name import require_loggers
from unisono.received import short
from unisono.settings.reading import settings_by_path, specified_in
from unisono.settings.table import Settings
from unisono.sync import strategy_of


@dataclass(frozen=True, slots=True)
class Script:
    """A script by its path, or a module by its name, and the arguments that are its own.

    Attributes:
        target: the path as the user gave it, or a module's dotted name.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Script:
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
        """Refuse a script that Python could not run, before any worker starts.

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
    is_there = outermost in sys.builtin_module_names or PathFinder.find_spec(outermost, [os.getcwd(), *sys.path])  # noqa: PTH109
    if not is_there:
        raise JobError(f"there is no module {name} (looked in {Path.cwd()} and the installed packages)")


@dataclass(frozen=True, slots=True)
class Size:
    """The number of workers of a job, and of devices of each worker."""

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
"""The most workers that one host offers to a coordinator."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The settings with which the workers of one job start on this host.

    Attributes:
        run_dir: the run folder; None makes a new one below ``runs``.
        options: the settings of the person who starts the job; the workers find out whether the policies, loggers and
            packages that it names are installed.
        memory_limit_mib: the most memory of the host that each worker may need, with its loader processes, in MiB; a
            worker that needs more is ended. None sets no limit.
    """

    script: Script
    workers: int = 1
    run_dir: Path | None = None
    options: Settings = field(default_factory=Settings)
    tuning: Tuning = field(default_factory=Tuning)
    extra_environment: dict[str, str] = field(default_factory=dict)
    memory_limit_mib: float | None = None

    @classmethod
    def tuned(cls, script: Script, options: Settings, **more: Any) -> LaunchSettings:
        """Settings that tune the workers' memory allocator as the options say, on top of this process's variables."""
        devices = options.communication.devices_per_worker
        tuning = Tuning.of_this_process(wanted=options.launch.tuning, devices=devices)
        return cls(script, options=options, tuning=tuning, **more)

    @property
    def threads(self) -> int:
        """The number of torch threads of each worker, unless the script sets another."""
        return self.options.arithmetic.threads

    @property
    def devices(self) -> int:
        """The number of devices of each worker, unless the script sets another."""
        return self.options.communication.devices_per_worker

    @property
    def processes(self) -> int:
        """The number of processes on this host: one for each device of each worker."""
        return self.workers * self.devices

    @property
    def pinning(self) -> Pinning:
        """Whether and how the workers are pinned on this host."""
        return Pinning.of_this_host(self.options.launch.pin, self.threads)

    @property
    def notice_source(self) -> NoticeSource | None:
        """The metadata services whose notices the job listens to; None if it listens to none.

        Raises:
            JobError: there is no such cloud, or a variable names no address.
        """
        cloud = self.options.launch.notices
        return None if cloud is None else NoticeSource.of_environment(cloud, os.environ)

    def with_variables(self, variables: Mapping[str, str]) -> LaunchSettings:
        """The settings with further variables for every worker."""
        return replace(self, extra_environment={**self.extra_environment, **variables})

    def with_options(self, values: Mapping[str, Any]) -> LaunchSettings:
        """The settings with further options, by the paths of their settings."""
        return replace(self, options=settings_by_path({**specified_in(self.options), **values}))

    def check(self, fewest: int = 1, *, is_here: bool = True) -> None:
        """Refuse settings that cannot work, before anything is started.

        Raises:
            JobError: a number is out of range, or the script cannot be run; names it.
        """
        options = self.options
        if self.workers < fewest:
            raise JobError(f"--workers {self.workers}: at least 1 is needed")
        if self.processes > MOST_WORKERS:
            raise JobError(f"--workers {self.workers}: at most {MOST_WORKERS} on one host")
        if options.shards is not None and self.workers > options.shards:
            shards, plural = shards_of_workers(self.workers, options.batch_size), "s" if options.shards > 1 else ""
            raise JobError(
                f"--workers {self.workers} with --shards {options.shards}: every worker needs at least one shard; "
                f"set --shards {shards}, or start at most {options.shards} worker{plural}"
            )
        _ = self.notice_source  # raises for a wrong address
        if options.strategy is not None:
            strategy_of(options.strategy)
        if options.policies:
            from unisono.adapt.policy_names import require_policies  # loads numpy, whose threads a fork would lack

            require_policies(list(map(str, options.policies)), "--policy")
        require_loggers(list(map(str, options.records.loggers)), "--log-to")
        if is_here:
            self.script.require_readable()


# The addresses of the clouds' metadata services.


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a metadata service."""

    host: str
    port: int = 80

    @classmethod
    def read(cls, text: str, variable: str) -> Endpoint:
        """The endpoint in a text ``http://HOST:PORT`` or ``HOST:PORT``, the value of a variable.

        Raises:
            JobError: it is no such address.
        """
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port or 80
            (host or "").encode("idna")
        except ValueError:
            host, port = None, 80
        if not host or parts.scheme != "http":
            raise JobError(f"{variable}={short(text)}: write the address of the metadata service as http://HOST:PORT")
        return cls(host, port)


AUTO = "auto"
LINK_LOCAL = Endpoint("169.254.169.254")

VARIABLES = {
    "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "gcp": "GCE_METADATA_HOST",
    "azure": "AZURE_POD_IDENTITY_AUTHORITY_HOST",
}
"""The variables from which the clouds' own libraries read another address of the service."""


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """The clouds to listen to, and the addresses of their metadata services.

    Attributes:
        cloud: ``aws``, ``gcp``, ``azure``, or ``auto`` for the one to which this machine belongs.
    """

    cloud: str
    endpoints: Mapping[str, Endpoint]

    @classmethod
    def of_environment(cls, cloud: str, environ: Mapping[str, str]) -> NoticeSource:
        """A source with the addresses that variables name, and otherwise the one that all clouds share.

        Raises:
            JobError: there is no such cloud, or a variable is no address.
        """
        if cloud not in (*VARIABLES, AUTO):
            raise JobError(f"--notices {cloud}: the clouds are {', '.join(VARIABLES)}, and {AUTO}")
        texts = {name: environ.get(variable, "") for name, variable in VARIABLES.items()}
        endpoints = {name: Endpoint.read(text, VARIABLES[name]) if text else LINK_LOCAL for name, text in texts.items()}
        return cls(cloud, endpoints if cloud == AUTO else {cloud: endpoints[cloud]})
