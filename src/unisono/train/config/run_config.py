"""The configuration of a run: one frozen value with a part for each subject, and how it is made."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unisono.adapt.batch_policies import LinearScaling
from unisono.adapt.norms import Monitoring, question_of
from unisono.adapt.policy_names import policies_named
from unisono.adapt.view import Policy
from unisono.device import choose_device, is_accelerator
from unisono.errors import JobError
from unisono.host.machine import usable_cores
from unisono.job import Job, default_shards
from unisono.loggers.by_name import loggers_of
from unisono.loggers.logger import Logger
from unisono.membership.environment import Environment, recognise
from unisono.membership.messages import MOST_DEVICES
from unisono.received import LONGEST_S, short, whole_number
from unisono.reduce.transport import Transport
from unisono.settings.reading import Variables, require_none_removed, settings_from
from unisono.settings.table import SHORTEST_S, Communication, Settings
from unisono.sync import AllReduce, Strategy, strategy_of

CHECKS: dict[str, int | None] = {"some": 8 * 2**20, "all": None, "none": 0}
"""How much of the gradients' memory is checked in each step, in bytes; None for all of it."""


@dataclass(frozen=True, slots=True)
class CoordinatorAccess:
    """The address of the job's coordinator, and this worker's id there.

    ``certificate`` is the one to trust; None for what the system trusts, or without TLS.
    """

    url: str
    token_file: Path
    worker: str
    certificate: Path | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> CoordinatorAccess | None:
        """Read the variables of the agent that started this worker; None for a job whose workers stay the same.

        Raises:
            JobError: a part is missing; names it.
        """
        names = ("UNISONO_COORDINATOR", "UNISONO_TOKEN_FILE", "UNISONO_WORKER")
        values = [environ.get(name) for name in names]
        if not values[0]:
            return None
        for name, value in zip(names, values, strict=True):
            if not value:
                raise JobError(f"{names[0]} is set in the environment, and {name} is not: both come from the launcher")
        url, token_file, worker = map(str, values)
        certificate = environ.get("UNISONO_CERTIFICATE")
        return cls(url, Path(token_file), worker, Path(certificate) if certificate else None)


@dataclass(frozen=True, slots=True)
class Connection:
    """The place of this worker among the others, and how long it waits for them.

    Attributes:
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

        If ``transport`` needs a core, all workers are on one host. ``threads`` are those of each worker.
        """
        if self.overlap is not None:
            return self.overlap
        return not transport.needs_core or cores() // transport.world_size > threads


@dataclass(frozen=True, slots=True)
class Recording:
    """The files that a run writes, and their places.

    Attributes:
        folder: the run folder; None for a new one.
        launcher_folder: the folder that the launcher has made; None without a launcher of ours.
        launcher_term: the term in which the launcher holds its folder; None if it holds none.
        trace: the folder for the digests of each step's weights; None for none.
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
        compares_bits: whether somebody compares this run's bits with another one's.
        scales_losses: whether the workers agree on a factor of their losses in each step.
    """

    reduction: str = "exact"
    compares_bits: bool = False
    scales_losses: bool = False

    def require(self, strategy: Strategy, workers: int | None = None) -> None:
        """Refuse a strategy that cannot be. ``workers`` is None where their number may change.

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
    """The settings that a run begins with, and policies may change. Policies are asked in their order."""

    policies: tuple[Policy, ...] = ()
    strategy: Strategy = field(default_factory=AllReduce)
    constraints: StrategyConstraints = field(default_factory=StrategyConstraints)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of a run. Nothing in it is open, and nothing of it changes.

    ``batch_set_by`` is the variable of the environment that sets the batch, whatever the script and its loops ask for.
    ``has_open_shards`` says that the size of a loop's batches decides how many shards have samples.
    """

    job: Job
    device: torch.device
    settings: Settings = field(default_factory=Settings)
    connection: Connection = field(default_factory=Connection)
    execution: Execution = field(default_factory=Execution)
    recording: Recording = field(default_factory=Recording)
    adaptation: Adaptation = field(default_factory=Adaptation)
    batch_set_by: str | None = None
    has_open_shards: bool = False

    @property
    def script_batch_size(self) -> int | None:
        """The batch that the script asks for, whatever the environment makes of it; None if its loops say it."""
        return self.job.batch_size if self.batch_set_by is None else self.settings.batch_size

    @property
    def verify_every(self) -> int | None:
        """The steps between comparisons of the workers' whole state; None to compare neither it nor their weights."""
        return self.settings.faults.verify_every or None


# Made from arguments and environment, with every check and before anything is opened.

KINDS: Mapping[str, Any] = {
    "device": str | int | torch.device | None,
    "strategy": Strategy | str | None,
    "policies": Sequence[Policy | str],
    "records.loggers": Sequence[Logger | str],
    "records.monitor": int | Monitoring,
}
"""The types of settings that only scripts have to know: of the table's room nothing above it is imported."""

BATCH = ("UNISONO_BATCH_SIZE", "UNISONO_BATCH_SCALE")
"""Variables that set the batch."""

BACKSTOP = 3.0
"""How many times ``faults.timeout_s`` workers of an elastic job wait for each other."""

BUCKET_MB = 4.0
"""The size of buckets that are reduced on CPUs while the next ones are computed, in MB."""

BUCKET_MB_OF_DEVICES = 25.0
"""The size of buckets, in MB, if each waits for a device, or if links need large messages."""


def configure(arguments: Mapping[str, Any], environ: Mapping[str, str], number: int = 1) -> RunConfig:
    """Work out how a run is carried out.

    ``arguments`` are those of :func:`unisono.init`; ``number`` is that of the run in its process, from 1.

    Raises:
        JobError: an argument or a variable is out of range, or two of them exclude each other; says what to change.
    """
    require_none_removed(environ)
    settings = settings_from(arguments, environ, KINDS)
    connection, recording = _connection(settings, environ, number), _recording(settings, Variables(environ), number)
    device = choose_device(settings.device, connection.environment.local_rank)
    job = _job(settings, BUCKET_MB_OF_DEVICES if is_accelerator(device) else BUCKET_MB)
    adaptation = _adaptation(settings, job, recording)
    execution = _execution(settings, adaptation, recording)
    is_scaled = "batch_scale" in settings.special.specified
    by = "UNISONO_BATCH_SIZE" if settings.special.batch_size else "UNISONO_BATCH_SCALE" if is_scaled else None
    is_open = settings.shards is None and job.batch_size is None
    return RunConfig(job, device, settings, connection, execution, recording, adaptation, by, is_open)


def _job(settings: Settings, bucket_mb: float) -> Job:
    batch_size, shards = settings.special.batch_size or settings.batch_size, settings.shards
    factor = settings.special.batch_scale
    if factor > 1 and batch_size is not None:  # a shard has as many samples as before
        shards = default_shards(batch_size) if shards is None else shards
        batch_size, shards = batch_size * factor, shards * factor
    values = {name: value for name, value in settings.arithmetic.values.items() if value is not None}
    values.setdefault("bucket_mb", bucket_mb)
    return Job.create(batch_size=batch_size, shards=shards, seed=settings.seed, **values)


def _recording(settings: Settings, variables: Variables, number: int) -> Recording:
    special, records = settings.special, settings.records
    profile = _profile(records.profile)
    loggers = loggers_of(records.loggers, "loggers, UNISONO_LOG_TO")
    launched = variables.get("UNISONO_RUN_DIR")
    return Recording(
        _folder(settings, launched, number),
        None if launched is None else Path(launched),
        variables.count("UNISONO_TERM", "", 1) if "UNISONO_TERM" in variables else None,
        trace=None if special.trace is None else Path(special.trace),
        loggers=loggers if special.curvature is None else (),
        timeline=records.timeline or profile is not None,
        profile=profile,
        curvature=None if special.curvature is None else Path(special.curvature),
    )


def _profile(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    steps = whole_number(first), whole_number(last)
    if steps[0] is None or steps[1] is None or not 0 <= steps[0] < steps[1]:
        raise JobError(f"records.profile={short(text)}: use FIRST:LAST, such as 10:12 for the steps 10 and 11")
    return range(steps[0], steps[1])


def _folder(settings: Settings, launched: str | None, number: int) -> Path | None:
    # Under `unisono verify` and `unisono study` even a script that names its folder must leave that one alone.
    special, own = settings.special, settings.run_dir
    if own == "":
        raise JobError('run_dir="" names no folder: name one (the working folder is "."), or leave it out')
    if own is not None and "\0" in os.fspath(own):
        raise JobError(f"run_dir={short(os.fspath(own))}: a folder's name has no zero byte")
    if own is not None and not (special.trace or special.curvature or special.study):
        return Path(own)
    # A script that starts several runs has one folder from its launcher: the later ones go inside of it.
    return None if launched is None else Path(launched) if number == 1 else Path(launched) / f"run-{number}"


def _connection(settings: Settings, environ: Mapping[str, str], number: int) -> Connection:
    coordinator = CoordinatorAccess.from_environ(environ)
    if number > 1 and coordinator is not None:
        raise JobError(
            "a script whose workers may change has one run: this is its second unisono.init. Start the second run in a "
            "script of its own, or both with unisono run -n N, without a range and without --max-restarts"
        )
    _require_devices(settings, environ, coordinator)
    timeout_s, variables = settings.faults.timeout_s, Variables(environ)
    silence_s = variables.number("UNISONO_FAILURE_TIMEOUT_S", SHORTEST_S, LONGEST_S)
    keys = settings.special.data_keys
    return Connection(
        settings.communication,
        # Who hangs is found by the coordinator. That workers wait for each other in vain is for when it does not.
        timeout_s if coordinator is None else BACKSTOP * timeout_s,
        min(timeout_s, silence_s or math.inf) / 2,
        recognise(environ),
        coordinator,
        None if keys is None else Path(keys),
    )


def _require_devices(settings: Settings, environ: Mapping[str, str], coordinator: CoordinatorAccess | None) -> None:
    """Refuse several devices of a worker where they cannot be.

    Raises:
        JobError: something is asked for that a worker of several devices cannot do; names it.
    """
    count = settings.communication.devices_per_worker
    environment = recognise(environ)
    if coordinator is not None and (count > MOST_DEVICES or count != environment.world_size):
        raise JobError(
            f"devices_per_worker={count}: the launcher has started {environment.world_size} for each worker of this "
            f"elastic job, and at most {MOST_DEVICES} are possible: say it with unisono run --devices-per-worker, "
            f"and leave it out of the script"
        )
    used = {
        "policies": bool(settings.policies),
        "monitor": bool(settings.records.monitor),
        "audit": bool(settings.faults.audit),
        "strategy": settings.strategy is not None,
        "precision='fp16'": settings.arithmetic.precision == "fp16",
    }
    if (refused := [name for name, is_used in used.items() if is_used]) and count > 1:
        raise JobError(
            f"devices_per_worker={count}: workers of several devices do not go together with {', '.join(refused)} yet. "
            f"Leave it out, or use one device per worker"
        )


def _adaptation(settings: Settings, job: Job, recording: Recording) -> Adaptation:
    made = _policies(settings, job)
    policies = (*made, *_scaling(settings, job, made))
    if policies:
        job.require_batch_size(f"policies={', '.join(policy.name for policy in policies)}")
    compares = recording.trace is not None or settings.special.samples
    return Adaptation(
        policies,
        strategy_of(AllReduce() if settings.strategy is None else settings.strategy),
        StrategyConstraints(job.reduction, compares, job.precision == "fp16"),
    )


def _policies(settings: Settings, job: Job) -> list[Policy]:
    """Those that the script makes, and those that are named."""
    names = [policy for policy in settings.policies if isinstance(policy, str)]
    batch_size = job.require_batch_size(f"policies={','.join(names)}") if names else 0
    made = iter(policies_named(names, batch_size, "policies, UNISONO_POLICIES"))
    return [next(made) if isinstance(policy, str) else policy for policy in settings.policies]


def _scaling(settings: Settings, job: Job, others: Sequence[Policy]) -> list[Policy]:
    """For a multiple of the script's batch, the policy that multiplies the learning rate.

    It grows from the script's to so many times that: Goyal et al., arXiv 1706.02677.
    """
    factor = settings.special.batch_scale
    if factor == 1:
        return []
    if any(isinstance(policy, LinearScaling) for policy in others):
        raise JobError(
            f"UNISONO_BATCH_SCALE={factor} multiplies the learning rate, and so does the LinearScaling among "
            f"this run's policies: leave one of the two out"
        )
    own = job.require_batch_size(f"UNISONO_BATCH_SCALE={factor}") // factor
    return [LinearScaling(factor, settings.special.batch_scale_warmup * own)]


def _execution(settings: Settings, adaptation: Adaptation, recording: Recording) -> Execution:
    return Execution(
        settings.communication.overlap,
        _monitoring(settings, adaptation),
        CHECKS[settings.faults.checks],
        settings.faults.audit,
        looks=settings.faults.verify_every > 0,
        # `unisono verify` watches the optimizers update all that they have.
        shared_from=SHARED_FROM if recording.trace is None else math.inf,
    )


def _monitoring(settings: Settings, adaptation: Adaptation) -> Monitoring:
    monitoring = settings.records.monitor
    if not isinstance(monitoring, Monitoring):
        monitoring = Monitoring(monitoring or int(any(policy.needs_monitor for policy in adaptation.policies)))
    if not monitoring.curvature_every:
        intervals = [policy.curvature_every for policy in adaptation.policies if policy.curvature_every]
        monitoring = replace(monitoring, curvature_every=min(intervals, default=0))
    if monitoring.curvature_every:
        question_of(monitoring.curvature)
        if not adaptation.strategy.is_exact:
            raise JobError(
                f"Monitoring(curvature_every={monitoring.curvature_every}): with the strategy {adaptation.strategy} "
                f"workers have weights of their own: leave it out, or use strategy='all-reduce'"
            )
    return monitoring
