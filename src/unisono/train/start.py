"""Starting a run: from arguments and environment to workers that stand ready."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch

from unisono.adapt.view import Policy
from unisono.checkpoint.folder import RunFolder
from unisono.checkpoint.store import CheckpointStore
from unisono.data.streams import seed_generators
from unisono.device import go_on_without_others
from unisono.host.script_end import OF_THIS_PROCESS as END_OF_SCRIPT
from unisono.host.script_end import ScriptEnd
from unisono.host.signals import NOTICES
from unisono.job import Job
from unisono.membership.environment import OF_THIS_PROCESS, Environment
from unisono.membership.rendezvous import Generation, TorchRendezvousStore
from unisono.membership.token import is_loopback
from unisono.plan.order import Stream, stream_seed
from unisono.plan.split import Split
from unisono.settings.names import unknown_variables
from unisono.settings.reading import with_groups
from unisono.settings.table import Arithmetic, Checkpoints, Communication, Faults, Records
from unisono.spans import Spans
from unisono.sync.strategy import Strategy
from unisono.telemetry import configure as configure_spans
from unisono.telemetry import flush as flush_spans
from unisono.train.assembly import Opened, assemble
from unisono.train.config.bits import bits_of
from unisono.train.config.configure import configure
from unisono.train.config.numerics import apply_numerics, fingerprint, script_digest
from unisono.train.config.run_config import Connection, CoordinatorAccess, RunConfig
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.connect import connect, connect_devices, mesh_of
from unisono.train.group.elastic import DeviceGroup, elastic
from unisono.train.group.membership import Fixed, Membership
from unisono.train.group.rendezvous import RUNS, FixedRendezvous, Rendezvous
from unisono.train.group.workers import SAME, Devices, Workers
from unisono.train.record.callbacks import load_plugins
from unisono.train.record.results import FailureNote
from unisono.train.run import Run
from unisono.train.state.checkpoints import RunCheckpoints, agreed_folder
from unisono.train.state.ending import LeaveRequest
from unisono.train.state.policy_state import PolicyState


class HostProcess:
    """What runs take from the process that they start in.

    Workers may also be threads of one process: each then says in ``HOST_PROCESS`` what it takes instead.

    Attributes:
        jobs: the jobs of the runs so far. What is refused is no run.
        variables: the environment's variables, from which a run hides those of the launcher.
        script_end: the end of the script.
        newest: the newest run; None before the first one.
    """

    def __init__(self, script_end: ScriptEnd = END_OF_SCRIPT) -> None:
        self.jobs: list[Job] = []
        self.variables = OF_THIS_PROCESS
        self.script_end = script_end
        self.newest: Run | None = None

    def apply_numerics(self, job: Job, device: torch.device) -> Callable[[], None]:
        """Set torch up for a job; returns what sets it back."""
        return apply_numerics(job, device).apply

    def membership(self, config: RunConfig) -> Membership:
        """Connect this worker to the others."""
        if config.connection.coordinator is not None:
            go_on_without_others(config.device)
        return _membership(config)

    def leave_request(self, connection: Connection) -> LeaveRequest:
        """What notes that this worker is asked to leave. Slurm lets people choose the signal by which it does.

        Args:
            connection: the place of this worker among the others, which knows the launcher.
        """
        says = connection.launcher != "unisono" and connection.environment.rank == 0
        return LeaveRequest(NOTICES if "SLURM_JOB_ID" in os.environ else (), says=says)

    def note_run(self, run: Run) -> None:
        """A run has started; it is closed at the end of the process, if not before."""
        self.newest = run
        atexit.register(run.inside.ending.close)


HOST_PROCESS: ContextVar[HostProcess] = ContextVar("HOST_PROCESS", default=HostProcess())  # noqa: B039
"""The one of this thread."""


@with_groups
def init(
    *,
    batch_size: int | None = None,
    seed: int = 0,
    shards: int | None = None,
    device: str | int | torch.device | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    strategy: Strategy | str | None = None,
    policies: Sequence[Policy | str] = (),
    arithmetic: Arithmetic | Mapping[str, Any] | None = None,
    checkpoints: Checkpoints | Mapping[str, Any] | None = None,
    faults: Faults | Mapping[str, Any] | None = None,
    communication: Communication | Mapping[str, Any] | None = None,
    records: Records | Mapping[str, Any] | None = None,
) -> Run:
    """Start a run, on however many workers the launcher started.

    Call it first: it seeds the random generators, so that a model built after it has the same weights on every
    worker and in every run. The script runs unchanged as ``python train.py``, under ``unisono run``, torchrun and
    srun. An argument goes before the environment, the environment before the default.

    A group of settings is a value of its class, or a dict: ``checkpoints=unisono.Checkpoints(every=100)``,
    ``checkpoints={"every": 100}``.

    Args:
        batch_size: the number of samples in one global batch, shared by all workers; by default each loop's own, which
            its ``DataLoader`` has or ``run.steps`` says.
        seed: the seed of every random stream.
        shards: the number of slices of the global batch, and the most workers the job can use; by default the largest
            power of two up to 8 that leaves 16 samples per shard, and 8 without ``batch_size``. The bits of the weights
            depend on it.
        device: the device; by default the GPU of the worker's local rank if there is one, else the CPU.
        run_dir: the run folder; one that holds checkpoints of the same job is resumed. By default a new one
            under ``runs/``.
        strategy: the synchronisation strategy (default: :class:`~unisono.AllReduce`), as a value or by its name. Only
            all-reduce and the synchronous parameter server are exact.
        policies: the policies, which watch the training, and change batch, learning rate and workers while it runs; as
            values or by their names.
        arithmetic: the way in which workers compute (:class:`~unisono.Arithmetic`): threads, precision, reduction,
            compression, buckets, determinism, portable numerics, and what happens to a loss that is not finite.
        checkpoints: the moments at which checkpoints are written, and which stay (:class:`~unisono.Checkpoints`).
        faults: the ways to find out what went wrong (:class:`~unisono.Faults`): time limits, comparisons, checks of
            memory, audits.
        communication: the ways of gradients between workers (:class:`~unisono.Communication`): transport, topology,
            encryption, overlap, devices of each worker, balance.
        records: the things that the run writes down (:class:`~unisono.Records`): loggers, timeline, profile, the
            gradients' noise.

    Raises:
        JobError: a setting is of another type or out of range, or there are more workers than shards: says which.
        JobMismatch: the workers, or the run folder, hold another job; lists the differences.
        LaunchError: the other workers cannot be reached.
    """
    arguments, process = locals(), HOST_PROCESS.get()
    config = configure(arguments, process.variables.all(), len(process.jobs) + 1)
    process.jobs.append(config.job)
    job, device, about = config.job, config.device, config.adaptation
    with ExitStack() as opened:  # whatever fails in here, all that was opened before it is closed again
        configure_spans(process.variables.all())
        opened.callback(flush_spans)
        policy_state = PolicyState.of(config)
        opened.callback(process.apply_numerics(job, device))
        membership = opened.enter_context(closing(process.membership(config)))
        about.constraints.require(about.strategy, None if membership.is_elastic else membership.workers.world_size)
        spans = Spans() if config.recording.timeline else None
        calls = CollectiveCalls(membership, spans=spans)
        calls.agree("job or machine", (marks := fingerprint(job, device)) | _besides(config), _same(job))
        if bits := _bits(config):
            calls.agree("way to compute", bits, SAME_MACHINES + _or_portable(job))
        folder = opened.enter_context(closing(agreed_folder(calls, membership, config)))
        written = opened.enter_context(closing(_checkpoints(folder, config)))
        leave = opened.enter_context(closing(process.leave_request(config.connection)))
        opened.callback(process.variables.hide())
        what = Opened(membership, folder, written, calls, leave, marks, policy_state, opened.pop_all(), spans)
    run = Run(assemble(config, what))
    process.note_run(run)
    return _begun(run, config, process.variables.all())


def _membership(config: RunConfig) -> Membership:
    job, connection, environment = config.job, config.connection, config.connection.environment

    count, timeout_s = connection.devices, connection.timeout_s
    if connection.coordinator is not None:
        return _elastic(config, connection.coordinator)
    place, here = environment.worker(count), environment.device(count)
    job.require_workers(place.world_size)
    devices, mesh = Devices(), None
    if count > 1:
        meeting = FixedRendezvous(here, timeout_s, environment, f"/worker-{place.rank}")
        mesh = mesh_of(config, meeting)
        devices = connect_devices(config, meeting, mesh)
    across = FixedRendezvous(
        place,
        timeout_s,
        environment,
        f"/device-{devices.rank}",
        keys=connection.data_keys,
        folder=RUNS if config.recording.folder is None else config.recording.folder.parent,
    )
    generation = Generation(1, place.rank, Split.even(job.shards, place.world_size))
    return Fixed(connect(config, generation, across, devices), mesh)


def _elastic(config: RunConfig, coordinator: CoordinatorAccess) -> Membership:
    how, count = config.connection, config.connection.devices
    here, timeout_s = how.environment, how.timeout_s
    meet = partial(FixedRendezvous, here.device(count), timeout_s, here)
    group: DeviceGroup | None = None
    if count > 1:
        beginning = meet("/devices", 0)
        board = TorchRendezvousStore(beginning.store(), timeout_s)
        group = DeviceGroup(Devices(here.rank, count, mesh := mesh_of(config, beginning)), mesh, board)

    def form(generation: Generation, rendezvous: Rendezvous) -> Workers:
        if group is None:
            return connect(config, generation, rendezvous)
        devices = connect_devices(config, meet("/devices", generation.number), group.mesh)
        try:
            return connect(config, generation, rendezvous, devices)
        except BaseException:
            devices.close()
            raise

    return elastic(coordinator, config.job.shards, how, form, group)


def _besides(config: RunConfig) -> dict[str, Any]:
    """What else workers must have in common: what decides on their bits, and on the collectives that they call."""
    about, execution = config.adaptation, config.execution
    return {
        "script": script_digest(),
        "policies": [policy.name for policy in about.policies],
        "strategy": str(about.strategy),
        "checked bytes": execution.checked_bytes,
        "audit": execution.audit,
        "monitor": asdict(execution.monitoring),
        "faults.verify_every": config.verify_every,
        "checkpoints.every": config.settings.checkpoints.every,
    }


SAME_MACHINES = (
    "Processors of different kinds compute other bits, and so do GPUs, drivers and libraries: start workers on hosts "
    "of one kind. unisono doctor shows on each host what it computes"
)
"""What to do about workers that compute other bits."""


def _same(job: Job) -> str:
    """What to do about workers whose jobs or machines differ."""
    return f"{SAME}. Of processors of several kinds{portable}" if (portable := _or_portable(job)) else SAME


def _or_portable(job: Job) -> str:
    is_offered = job.numerics == "native"
    return ", unisono run --numerics portable gives the same bits" if is_offered else ""


def _bits(config: RunConfig) -> dict[str, str]:
    """What this worker computes, where others may be on another host: on one, all compute alike."""
    here, coordinator = config.connection.environment, config.connection.coordinator
    is_alone = here.world_size == here.local_world_size
    if coordinator is not None:
        is_alone = is_loopback(urlsplit(coordinator.url).hostname or "")
    return {} if is_alone else {f"bits of {name}": digest for name, digest in bits_of(config.device).items()}


def _checkpoints(folder: RunFolder, config: RunConfig) -> RunCheckpoints:
    settings = config.settings.checkpoints
    open_store = partial(
        CheckpointStore, folder.checkpoints, keep=settings.keep, on_event=folder.journal, writer=folder.writer
    )
    return RunCheckpoints(open_store, every=settings.every)


def _begun(run: Run, config: RunConfig, variables: Mapping[str, str]) -> Run:
    inside = run.inside
    if config.batch_set_by is not None and run.is_main:
        about = {"script": config.asked_batch_size, "batch_size": run.job.batch_size}
        inside.folder.journal("batch size set from outside", variable=config.batch_set_by, **about)
    inside.ending.also(FailureNote(inside.results).close)
    _announce(run, config)
    for words in unknown_variables(variables) if run.is_main else ():
        print(f"unisono: {words}", file=sys.stderr, flush=True)  # noqa: T201  a setting that has no effect
    seed_generators(stream_seed(run.job.seed, Stream.SCRIPT, -1))
    try:
        for plugin in load_plugins(config.settings.special.plugins):
            plugin(run)
    except BaseException:
        run.close()
        raise
    return run


def _announce(run: Run, config: RunConfig) -> None:
    if not run.is_main:
        return
    environment, launcher = config.connection.environment, config.connection.launcher
    open_to_others = {"insecure_data": True} if config.settings.communication.insecure_data else {}
    run.inside.folder.journal(
        "started", world_size=run.world_size, launcher=launcher, pid=os.getpid(), **open_to_others
    )
    print(  # noqa: T201  the choice of launcher is something to see
        f"unisono: launched by {_launched(run, environment)}; {run.job.shards} shards, {_batch(run.job)}, "
        f"{run.job.threads} thread{'s' if run.job.threads > 1 else ''} per worker, {run.device}{_open_to_others(run)}, "
        f"run folder {run.dir}",
        file=sys.stderr,
        flush=True,
    )


def _batch(job: Job) -> str:
    return "the batch of each loop" if job.batch_size is None else f"batch {job.batch_size}"


def _open_to_others(run: Run) -> str:
    is_open = run.inside.membership.workers.is_open
    return ", over torch's own network, which other users of its hosts can reach" if is_open else ""


def _launched(run: Run, environment: Environment) -> str:
    if not run.inside.membership.is_elastic:
        count = run.inside.membership.workers.devices.count
        return environment.describe() + (f", {count} devices per worker" if count > 1 else "")
    return f"unisono: {run.world_size} workers to begin with, elastic"
