"""The start of a run: from arguments and environment to connected workers."""

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
from unisono.checkpoint.checkpoint_store import CheckpointStore
from unisono.checkpoint.folder import RunFolder
from unisono.data.generators import seed_generators
from unisono.device import disable_nccl_watchdog
from unisono.host.process import NOTICES, ScriptEnd
from unisono.host.process import OF_THIS_PROCESS as END_OF_SCRIPT
from unisono.job import Job
from unisono.membership.environment import OF_THIS_PROCESS, Environment
from unisono.membership.rendezvous import Generation, TorchRendezvousStore
from unisono.membership.token import is_loopback
from unisono.plan.order import Stream, stream_seed
from unisono.plan.split import Split
from unisono.settings.reading import unknown_variables, with_groups
from unisono.settings.table import Arithmetic, Checkpoints, Communication, Faults, Records
from unisono.spans import Spans
from unisono.sync import Strategy
from unisono.telemetry import configure as configure_spans
from unisono.telemetry import flush as flush_spans
from unisono.train.assembly import Opened, assemble
from unisono.train.config.bits import bits_of
from unisono.train.config.numerics import apply_numerics, fingerprint, script_digest
from unisono.train.config.run_config import Connection, CoordinatorAccess, RunConfig, configure
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.connect import connect, connect_devices, mesh_of
from unisono.train.group.elastic import DeviceGroup, elastic
from unisono.train.group.meeting import RUNS, FixedRendezvous, Rendezvous
from unisono.train.group.membership import Fixed, Membership
from unisono.train.group.workers import SAME, Devices, Workers
from unisono.train.plugins import load_plugins
from unisono.train.record.result_file import FailureNote
from unisono.train.run import Run
from unisono.train.state.checkpoints import RunCheckpoints, agreed_folder
from unisono.train.state.ending import LeaveRequest
from unisono.train.state.policy_state import PolicyState


class HostProcess:
    """The objects of a process that the runs in it use.

    If workers are threads of one process, each sets its own in ``HOST_PROCESS``.

    Attributes:
        jobs: the jobs of the runs so far. A run whose settings are refused does not count.
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
        """Set up torch for a job. Returns a function that undoes it."""
        return apply_numerics(job, device).apply

    def membership(self, config: RunConfig) -> Membership:
        """Connect this worker to the others."""
        if config.connection.coordinator is not None:
            disable_nccl_watchdog(config.device)
        return _membership(config)

    def leave_request(self, connection: Connection) -> LeaveRequest:
        """Return the object that notes when this worker is asked to leave.

        In Slurm jobs people choose the signal that asks.

        Args:
            connection: the place of this worker among the others, which knows the launcher.
        """
        prints = connection.launcher != "unisono" and connection.environment.rank == 0
        return LeaveRequest(NOTICES if "SLURM_JOB_ID" in os.environ else (), prints=prints)

    def note_run(self, run: Run) -> None:
        """Note that a run has started, and close it at the end of the process, if it is still open."""
        self.newest = run
        atexit.register(run.inside.ending.close)


HOST_PROCESS: ContextVar[HostProcess] = ContextVar("HOST_PROCESS", default=HostProcess())  # noqa: B039
"""The host process, as this thread sees it."""


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
    strict: bool = False,
    arithmetic: Arithmetic | Mapping[str, Any] | None = None,
    checkpoints: Checkpoints | Mapping[str, Any] | None = None,
    faults: Faults | Mapping[str, Any] | None = None,
    communication: Communication | Mapping[str, Any] | None = None,
    records: Records | Mapping[str, Any] | None = None,
) -> Run:
    """Start a run, on as many workers as the launcher has started.

    Call it first: it seeds the random generators, so that a model built after it has the same weights on every
    worker and in every run. The script runs unchanged as ``python train.py``, under ``unisono run``, torchrun and
    srun. Arguments take precedence over the environment, and the environment over defaults.

    A group of settings is a value of its class, or a dict: ``checkpoints=unisono.Checkpoints(every=100)``,
    ``checkpoints={"every": 100}``.

    Args:
        batch_size: the number of samples in one global batch, shared by all workers; by default each loop has its own,
            from its ``DataLoader`` or from ``run.steps``.
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
        strict: whether to end the job where others are warned of state beside the model that the run does not keep.
        arithmetic: the way in which workers compute (:class:`~unisono.Arithmetic`): threads, precision, reduction,
            compression, buckets, determinism, portable numerics, and what happens to a loss that is not finite.
        checkpoints: the moments at which checkpoints are written, and which stay (:class:`~unisono.Checkpoints`).
        faults: the ways to find out what went wrong (:class:`~unisono.Faults`): time limits, comparisons, checks of
            memory, audits.
        communication: the ways in which gradients travel between workers (:class:`~unisono.Communication`): transport,
            topology, encryption, overlap, devices of each worker, balance.
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
    job, device, adaptation = config.job, config.device, config.adaptation
    with ExitStack() as stack:  # if anything fails in here, what is open is closed
        configure_spans(process.variables.all())
        stack.callback(flush_spans)
        policy_state = PolicyState.of(config)
        stack.callback(process.apply_numerics(job, device))
        membership = stack.enter_context(closing(process.membership(config)))
        adaptation.constraints.require(
            adaptation.strategy, None if membership.is_elastic else membership.workers.world_size
        )
        spans = Spans() if config.recording.timeline else None
        calls = CollectiveCalls(membership, spans=spans)
        calls.agree("job or machine", (own_fingerprint := fingerprint(job, device)) | _besides(config), _same(job))
        if bits := _bits(config):
            calls.agree("way to compute", bits, SAME_MACHINES + _or_portable(job))
        folder = stack.enter_context(closing(agreed_folder(calls, membership, config)))
        run_checkpoints = stack.enter_context(closing(_checkpoints(folder, config)))
        leave = stack.enter_context(closing(process.leave_request(config.connection)))
        stack.callback(process.variables.hide())
        parts = Opened(
            membership, folder, run_checkpoints, calls, leave, own_fingerprint, policy_state, stack.pop_all(), spans
        )
    run = Run(assemble(config, parts))
    process.note_run(run)
    return _begun(run, config, process.variables.all())


def _membership(config: RunConfig) -> Membership:
    job, connection, environment = config.job, config.connection, config.connection.environment

    count, timeout_s = connection.devices, connection.timeout_s
    if connection.coordinator is not None:
        return _elastic(config, connection.coordinator)
    worker, device = environment.worker(count), environment.device(count)
    job.require_workers(worker.world_size)
    devices, mesh = Devices(), None
    if count > 1:
        rendezvous = FixedRendezvous(device, timeout_s, environment, f"/worker-{worker.rank}")
        mesh = mesh_of(config, rendezvous)
        devices = connect_devices(config, rendezvous, mesh)
    across_workers = FixedRendezvous(
        worker,
        timeout_s,
        environment,
        f"/device-{devices.rank}",
        keys=connection.data_keys,
        folder=RUNS if config.recording.folder is None else config.recording.folder.parent,
    )
    generation = Generation(1, worker.rank, Split.even(job.shards, worker.world_size))
    return Fixed(connect(config, generation, across_workers, devices), mesh)


def _elastic(config: RunConfig, coordinator: CoordinatorAccess) -> Membership:
    connection, count = config.connection, config.connection.devices
    environment, timeout_s = connection.environment, connection.timeout_s
    meet = partial(FixedRendezvous, environment.device(count), timeout_s, environment)
    group: DeviceGroup | None = None
    if count > 1:
        first_rendezvous = meet("/devices", 0)
        board = TorchRendezvousStore(first_rendezvous.store(), timeout_s)
        group = DeviceGroup(Devices(environment.rank, count, mesh := mesh_of(config, first_rendezvous)), mesh, board)

    def form(generation: Generation, rendezvous: Rendezvous) -> Workers:
        if group is None:
            return connect(config, generation, rendezvous)
        devices = connect_devices(config, meet("/devices", generation.number), group.mesh)
        try:
            return connect(config, generation, rendezvous, devices)
        except BaseException:
            devices.close()
            raise

    return elastic(coordinator, config.job.shards, connection, form, group)


def _besides(config: RunConfig) -> dict[str, Any]:
    """Return further settings that all workers need alike: they decide bits, or which collective calls workers make."""
    adaptation, execution = config.adaptation, config.execution
    return {
        "script": script_digest(),
        "policies": [policy.name for policy in adaptation.policies],
        "strategy": str(adaptation.strategy),
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
"""Advice for workers that compute other bits."""


def _same(job: Job) -> str:
    """The advice for workers whose jobs or machines differ."""
    return f"{SAME}. Of processors of several kinds{portable}" if (portable := _or_portable(job)) else SAME


def _or_portable(job: Job) -> str:
    is_offered = job.numerics == "native"
    return ", unisono run --numerics portable gives the same bits" if is_offered else ""


def _bits(config: RunConfig) -> dict[str, str]:
    """Digests of what this worker computes, if others may be on another host: on one host all compute the same."""
    environment, coordinator = config.connection.environment, config.connection.coordinator
    is_alone = environment.world_size == environment.local_world_size
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
        sizes = {"script": config.script_batch_size, "batch_size": run.job.batch_size}
        inside.folder.journal("batch size set from outside", variable=config.batch_set_by, **sizes)
    inside.ending.also(FailureNote(inside.results).close)
    run.inside.ending.also(HOST_PROCESS.get().script_end.then(partial(_miss_finish, run)))
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


def _miss_finish(run: Run) -> None:
    """Say that a script has ended without run.finish, unless it has not trained, or was cut short from outside."""
    special = run.inside.config.settings.special
    is_asked_for = (
        special.study or special.curvature or special.trace or special.stop_after or special.stop_after_epochs
    )
    if run.inside.loop.body.has_trained and run.is_main and not (is_asked_for or run.inside.ending.is_closed):
        print(  # noqa: T201
            "unisono: the script ended without run.finish(model): the workers' weights were not compared, and no "
            "digest was printed",
            file=sys.stderr,
            flush=True,
        )


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
        return environment.describe() + run.inside.membership.workers.devices.words
    return f"unisono: {run.world_size} workers to begin with, elastic"
