"""The configuration of a run: one frozen value, which is made once and has a part for each subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from unisono.adapt.norms import Monitoring
from unisono.adapt.view import Policy
from unisono.errors import JobError
from unisono.host.cgroup import usable_cores
from unisono.job import Job
from unisono.loggers.logger import Logger
from unisono.membership.environment import Environment
from unisono.reduce.transport import Transport
from unisono.settings.table import Communication, Settings
from unisono.sync.strategy import AllReduce, Strategy

CHECKS: dict[str, int | None] = {"some": 8 * 2**20, "all": None, "none": 0}
"""How much of the gradients' memory is checked in each step, in bytes; None for all of it."""


@dataclass(frozen=True, slots=True)
class CoordinatorAccess:
    """The address of the job's coordinator, and this worker's id there.

    Attributes:
        url: the URL of the coordinator.
        token_file: the file with the job's token.
        worker: the id of this worker.
        certificate: the certificate to trust; None for what the system trusts, or without TLS.
    """

    url: str
    token_file: Path
    worker: str
    certificate: Path | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> CoordinatorAccess | None:
        """What the agent that started this worker says; None for a job whose workers stay the same.

        Raises:
            JobError: a part is missing; names it.
        """
        names = ("UNISONO_COORDINATOR", "UNISONO_TOKEN_FILE", "UNISONO_WORKER")
        found = [environ.get(name) for name in names]
        if not found[0]:
            return None
        for name, value in zip(names, found, strict=True):
            if not value:
                raise JobError(f"{names[0]} is set in the environment, and {name} is not: both come from the launcher")
        url, token_file, worker = map(str, found)
        certificate = environ.get("UNISONO_CERTIFICATE")
        return cls(url, Path(token_file), worker, Path(certificate) if certificate else None)


@dataclass(frozen=True, slots=True)
class Connection:
    """The place of this worker among the others, and how long it waits for them.

    Attributes:
        how: the settings of the connections between workers.
        timeout_s: the longest wait for another worker, in seconds.
        silence_s: the seconds without the coordinator after which the job may soon go on without this worker.
        environment: the place of this worker among those that were started with it.
        coordinator: the access to the coordinator of an elastic job; None for a job whose workers stay the same.
        data_keys: the file with the keys of the network between hosts; None where there is a coordinator, which hands
            some out, and where there is one host.
    """

    how: Communication = field(default_factory=Communication)
    timeout_s: float = 300.0
    silence_s: float = 150.0
    environment: Environment = field(default_factory=lambda: Environment("single", 0, 1, 0, 1, ""))
    coordinator: CoordinatorAccess | None = None
    data_keys: Path | None = None

    @property
    def devices(self) -> int:
        """The number of devices of a worker, each driven by a process of its own."""
        return self.how.devices_per_worker

    @property
    def launcher(self) -> str:
        """The launcher that started this worker: one of ours, if there is a coordinator."""
        return self.environment.launcher if self.coordinator is None else "unisono"


SHARED_FROM = 5e7
"""Multiplications of an update of whole matrices or layers, from which on workers share them: one owner for each."""


@dataclass(frozen=True, slots=True)
class Execution:
    """The settings of the computation that decide no bit.

    Attributes:
        overlap: whether gradients are reduced during the backward pass; None to do so where it pays.
        monitoring: the steps that are watched, and how closely.
        checked_bytes: the number of bytes of gradients whose memory is checked in each step; None for all of them.
        audit: the share of the shards that are computed again, from 0 to 1.
        looks: whether flipped bits in memory are looked for in every step.
        shared_from: the multiplications of an update of whole matrices or layers from which on workers share them.
    """

    overlap: bool | None = None
    monitoring: Monitoring = field(default_factory=Monitoring)
    checked_bytes: int | None = CHECKS["some"]
    audit: float = 0.0
    looks: bool = False
    shared_from: float = SHARED_FROM

    def overlaps(self, transport: Transport, threads: int, cores: Callable[[], int] = usable_cores) -> bool:
        """Whether to reduce beside the backward pass: additions on cores that are all busy would only delay it.

        Args:
            transport: the transport between the workers, which are on one host if it needs a core.
            threads: the number of threads of each worker.
            cores: a function that returns how many cores this host lets a process use.
        """
        if self.overlap is not None:
            return self.overlap
        return not transport.needs_core or cores() // transport.world_size > threads


@dataclass(frozen=True, slots=True)
class Recording:
    """What a run writes down, and where.

    Attributes:
        folder: the run folder; None for a new one.
        launcher_folder: the folder that the launcher has made; None without a launcher of ours.
        launcher_term: the term in which the launcher holds its folder; None if it holds none.
        trace: the folder for the digests of each step's weights; None for none.
        loggers: the loggers that get the figures of each step.
        timeline: whether each worker's spans are noted.
        profile: the steps in which torch's profiler runs on each worker; None for none.
        curvature: the folder in which ``unisono curvature`` says what to measure on a checkpoint, instead of training.
    """

    folder: Path | None = None
    launcher_folder: Path | None = None
    launcher_term: int | None = None
    trace: Path | None = None
    loggers: tuple[Logger, ...] = ()
    timeline: bool = False
    profile: range | None = None
    curvature: Path | None = None

    def term_in(self, path: Path) -> int | None:
        """The term in which the launcher holds a run folder; None for one that it does not hold."""
        if self.launcher_folder is None:
            return None
        launched = self.launcher_folder.absolute()
        return self.launcher_term if path == launched or launched in path.parents else None


@dataclass(frozen=True, slots=True)
class StrategyConstraints:
    """The constraints on every strategy of a run: the first one, and those that policies choose.

    Attributes:
        reduction: the reduction of the job.
        compares_bits: whether somebody compares this run's bits with another one's.
        scales_losses: whether the workers agree on a factor of their losses in each step.
    """

    reduction: str = "exact"
    compares_bits: bool = False
    scales_losses: bool = False

    def require(self, strategy: Strategy, workers: int | None = None) -> None:
        """Refuse a strategy that cannot be.

        Args:
            strategy: the strategy to use.
            workers: the number of workers; None where that may change.

        Raises:
            JobError: says what to change.
        """
        if self.reduction != "exact" and strategy.central_servers is not None:
            raise JobError(
                f"strategy={str(strategy)!r} has servers finish exact sums, and reduction={self.reduction!r} is the "
                f"backend's own: leave one of them out"
            )
        if self.compares_bits and not strategy.is_exact:
            raise JobError(
                f"unisono verify and unisono chaos compare bits, which strategy={str(strategy)!r} does not promise: "
                f"only all-reduce and the synchronous parameter-server do"
            )
        if self.scales_losses and not strategy.is_exact:
            raise JobError(
                f"precision='fp16': with strategy={str(strategy)!r} workers have weights of their own, and would scale "
                f"their losses differently: use 'bf16', or strategy='all-reduce'"
            )
        strategy.require(workers)


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The settings that a run begins with, and policies may change.

    Attributes:
        policies: the policies, in the order in which they are asked.
        strategy: the strategy by which workers synchronise.
        constraints: the constraints on this strategy, and on those that policies choose.
    """

    policies: tuple[Policy, ...] = ()
    strategy: Strategy = field(default_factory=AllReduce)
    constraints: StrategyConstraints = field(default_factory=StrategyConstraints)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of a run. Nothing in it is open, and nothing of it changes.

    Attributes:
        job: the job to train.
        device: the device on which this worker computes.
        settings: all that script and environment say.
        connection: the place of this worker among the others.
        execution: the settings of the computation that decide no bit.
        recording: the run folder, and what is written down besides.
        adaptation: strategy and policies.
        batch_set_by: the variable of the environment that sets the batch, whatever the script and its loops ask for.
    """

    job: Job
    device: torch.device
    settings: Settings = field(default_factory=Settings)
    connection: Connection = field(default_factory=Connection)
    execution: Execution = field(default_factory=Execution)
    recording: Recording = field(default_factory=Recording)
    adaptation: Adaptation = field(default_factory=Adaptation)
    batch_set_by: str | None = None

    @property
    def asked_batch_size(self) -> int | None:
        """The batch that the script asks for, whatever the environment makes of it; None if its loops say it."""
        return self.job.batch_size if self.batch_set_by is None else self.settings.batch_size

    @property
    def verify_every(self) -> int | None:
        """The steps between comparisons of the workers' whole state; None to compare neither it nor their weights."""
        return self.settings.faults.verify_every or None
