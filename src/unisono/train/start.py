"""Starting a run: from arguments and environment to workers that stand ready."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from unisono.adapt.named import policies_named
from unisono.adapt.norms import Monitoring
from unisono.adapt.policy import Policy
from unisono.checkpoint.folder import RunFolder
from unisono.checkpoint.store import CheckpointStore
from unisono.data.streams import seed_generators
from unisono.errors import JobError
from unisono.job import Compression, Job, Precision, Reduction
from unisono.membership.environment import Environment, recognise
from unisono.membership.rendezvous import Generation
from unisono.plan.order import Stream, stream_seed
from unisono.plan.split import Split
from unisono.sync.named import strategy_of
from unisono.sync.strategy import AllReduce, Strategy
from unisono.train.assembly import assemble
from unisono.train.config.numerics import apply_numerics, fingerprint, script_digest
from unisono.train.config.settings import Settings
from unisono.train.config.strategy_constraints import StrategyConstraints
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.connect import Connection, FixedRendezvous, Rendezvous, TopologyName, TransportName, connect
from unisono.train.group.elastic import elastic
from unisono.train.group.membership import Fixed, Membership
from unisono.train.group.workers import Workers
from unisono.train.loop.prefetch import choose_device
from unisono.train.record.callbacks import load_plugins
from unisono.train.record.results import FailureNote
from unisono.train.run import Run
from unisono.train.state.checkpoints import Checkpoints, agreed_folder
from unisono.train.state.ending import LeaveRequest
from unisono.train.state.policy_state import PolicyState
from unisono.train.step.engine import CHECKS, Execution
from unisono.train.step.run_context import BACKSTOP, FaultTolerance, RunContext

G = TypeVar("G")

_runs = itertools.count(1)


def init(
    *,
    batch_size: int,
    seed: int = 0,
    shards: int | None = None,
    threads: int | None = None,
    reduction: Reduction = "exact",
    precision: Precision = "float32",
    compression: Compression = "none",
    bucket_mb: float = 4.0,
    deterministic: bool = True,
    on_nan: Literal["stop", "skip"] = "stop",
    device: str | torch.device | None = None,
    transport: TransportName | None = None,
    topology: TopologyName | None = None,
    overlap: bool | None = None,
    shard_optimizer: bool | None = None,
    run_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    allow_job_change: bool = False,
    failure_timeout_s: float = 300.0,
    verify_every: int | None = None,
    checks: Literal["some", "all", "none"] | None = None,
    audit: float | None = None,
    balance: Literal["even", "speed"] = "even",
    monitor: int | Monitoring = 0,
    policies: Sequence[Policy] = (),
    strategy: Strategy | str | None = None,
) -> Run:
    """Start a run, on however many workers the launcher started.

    Call it first: it seeds the random generators, so that a model built after it has the same weights on every
    worker and in every run. The script runs unchanged as ``python train.py``, under ``unisono run``, torchrun and
    srun. An argument goes before the environment, the environment before the default.

    Args:
        batch_size: samples in one global batch, shared by all workers.
        seed: of every random stream.
        shards: slices of the global batch, and the most workers the job can use; by default the largest power of
            two up to 8 that leaves 16 samples per shard. The bits of the weights depend on it.
        threads: torch threads per worker; by default 1. The bits depend on it.
        reduction: ``exact``, or ``native`` for the backend's own all-reduce with its own order of additions.
        precision: ``bf16`` runs forward passes under autocast.
        compression: ``bf16`` sends gradients as bfloat16, rounded at every node of the summation tree, so that the bits
            still do not depend on the number of workers.
        bucket_mb: gradients are reduced in buckets of about this many MiB.
        deterministic: refuse operations that have no deterministic version.
        on_nan: a loss that is NaN or infinite stops the job, or skips the step.
        device: where to compute; by default the GPU of the worker's local rank if there is one, else the CPU.
        transport: how workers exchange gradients; decides no bit. By default ``shared_memory`` between workers of one
            host on CPUs, else ``process_group`` (Gloo or NCCL).
        topology: the way of the partial sums over a process group: ``direct``, ``ring``, ``tree`` or ``star``; decides
            no bit. By default ``auto``, which measures them when the workers have met.
        overlap: reduce gradients while the backward pass is still under way. Decides no bit. By default wherever that
            saves time: not over shared memory when the workers' threads keep all cores busy.
        shard_optimizer: the workers of one host share their parameters and split the update and the optimizer's state
            (default: no). Decides no bit.
        run_dir: the run folder; one that holds checkpoints of the same job is resumed. By default a new one
            under ``runs/``.
        checkpoint_every: steps between automatic checkpoints; by default none are written.
        keep: how many checkpoints stay.
        allow_job_change: resume although settings differ.
        failure_timeout_s: how long, in seconds, a worker may be silent, or come no further while others wait for it,
            before it is given up.
        verify_every: steps between comparisons of all workers' whole state, of which a copy is kept to go back to. In
            every step they compare their weights and buffers (default: 100; 0: neither).
        checks: how much of the gradients' memory is checked in each step, from where a gradient is taken to the update:
            ``all``; ``some``, which is all of up to 8 MiB, and as much of larger ones, each part in turn; or ``none``.
            Decides no bit (default: ``some``).
        audit: the share of the work that is computed again by another worker and compared bit for bit; a third one says
            who is wrong. Decides no bit (default: 0).
        balance: ``speed`` gives slower workers fewer shards, in an elastic job. Decides no bit.
        monitor: steps from one whose gradients' noise is measured to the next; 0 for none. Decides no bit.
        policies: watch the training, and change batch, learning rate and workers while it runs.
        strategy: how workers synchronise (default: :class:`~unisono.AllReduce`), as a value or by its name. Only
            all-reduce and the synchronous parameter server are exact.

    Raises:
        JobError: a setting is out of range, or there are more workers than shards; says which to change.
        JobMismatch: the workers, or the run folder, hold another job; lists the differences.
        LaunchError: the other workers cannot be reached.
    """
    settings = Settings.from_environ(os.environ).allowing(allow_job_change)
    job = Job.create(
        **settings.batch_scale.scaled(_first(settings.batch_size, batch_size), _first(shards, settings.shards)),
        seed=seed,
        threads=_first(threads, settings.threads, 1),
        reduction=reduction,
        precision=precision,
        compression=compression,
        bucket_mb=bucket_mb,
        deterministic=deterministic,
        on_nan=on_nan,
    )
    every = _checkpoint_every(checkpoint_every, keep, settings)
    tolerance = FaultTolerance.of(failure_timeout_s, _first(verify_every, settings.verify_every), balance)
    environment, wanted = recognise(os.environ), _folder(run_dir, settings, _number(settings))
    chosen = choose_device(device, environment.local_rank)
    state = _policy_state(policies, settings, tolerance, _constraints(shard_optimizer, job, settings), job, strategy)
    execution = _execution(overlap, (checks, audit), settings, state, monitor, tolerance)
    with ExitStack() as opened:  # whatever fails in here, all that was opened before it is closed again
        opened.callback(apply_numerics(job, chosen).apply)
        how = Connection(transport or settings.transport, topology or settings.topology, chosen, failure_timeout_s)
        membership = opened.enter_context(closing(_membership(job, environment, how, settings)))
        _require_strategy(state, membership)
        calls = CollectiveCalls(membership)
        calls.agree("job or machine", (marks := fingerprint(job, chosen)) | _besides(state, execution))
        folder = opened.enter_context(closing(agreed_folder(calls, membership, wanted, job, settings)))
        checkpoints = opened.enter_context(closing(_checkpoints(folder, keep, every)))
        leave = opened.enter_context(closing(LeaveRequest()))
        context = RunContext(settings, folder, marks, calls, leave, execution, tolerance, state, opened.pop_all())
    return _begun(Run(assemble(job, membership, chosen, checkpoints, context)), environment, batch_size, settings)


def _membership(job: Job, environment: Environment, how: Connection, settings: Settings) -> Membership:
    if settings.coordinator is not None:
        told_s = settings.failure_timeout_s or math.inf
        silence_s = min(how.timeout_s, told_s) / 2
        # Who hangs is found by the coordinator. That workers wait for each other in vain is for when it does not.
        how = replace(how, timeout_s=BACKSTOP * how.timeout_s)

    def form(generation: Generation, rendezvous: Rendezvous) -> Workers:
        return connect(job, generation, rendezvous, how)

    if settings.coordinator is not None:
        return elastic(settings.coordinator, job, environment.host, form, how.timeout_s, silence_s)
    job.require_workers(environment.world_size)
    generation = Generation(1, environment.rank, Split.even(job.shards, environment.world_size))
    return Fixed(form(generation, FixedRendezvous(environment, how.timeout_s)))


def _begun(run: Run, environment: Environment, said: int, settings: Settings) -> Run:
    inside = run.inside
    if settings.batch_size is not None and run.is_main:
        about = {"variable": "UNISONO_BATCH_SIZE", "script": said, "batch_size": run.job.batch_size}
        inside.folder.journal("batch size set from outside", **about)
    inside.ending.also(FailureNote(inside.results).close)
    _announce(run, environment)
    seed_generators(stream_seed(run.job.seed, Stream.SCRIPT, -1))
    atexit.register(inside.ending.close)
    try:
        for plugin in load_plugins(settings.plugins):
            plugin(run)
    except BaseException:
        run.close()
        raise
    return run


def _first(*given: G | None) -> G | None:
    return next((value for value in given if value is not None), None)


def _constraints(shard_optimizer: bool | None, job: Job, settings: Settings) -> StrategyConstraints:
    # Whoever watches the optimizers of `unisono verify` wants to see them update whole tensors.
    splits = _first(shard_optimizer, settings.shard_optimizer) is True and settings.trace is None
    if splits and settings.coordinator is not None:
        raise JobError(
            "shard_optimizer=True leaves half updated weights behind when a worker is lost in an update, so it needs "
            "workers that stay the same: unisono run -n N, without a range and without --max-restarts"
        )
    return StrategyConstraints(
        job.reduction, splits, compares_bits=settings.trace is not None or bool(settings.samples)
    )


def _execution(
    overlap: bool | None,
    checking: tuple[str | None, float | None],
    settings: Settings,
    policy_state: PolicyState,
    monitor: int | Monitoring,
    fault_tolerance: FaultTolerance,
) -> Execution:
    monitoring = _monitoring(monitor, settings, policy_state)
    found = _checking(*checking, settings)
    looks = fault_tolerance.verify_every is not None
    return Execution(
        _first(overlap, settings.overlap), policy_state.constraints.splits_update, monitoring, *found, looks
    )


def _checking(checks: str | None, audit: float | None, settings: Settings) -> tuple[int | None, float]:
    """How many bytes of gradients are checked in a step, and the share of the work that is audited."""
    chosen, share = checks or settings.checks or "some", _first(audit, settings.audit, 0.0)
    if chosen not in CHECKS:
        raise JobError(f"checks={chosen!r}: use {', '.join(map(repr, CHECKS))}")
    if share is None or not 0 <= share <= 1:
        raise JobError(f"audit={share!r}: use a share between 0 and 1, such as 0.01")
    return CHECKS[chosen], share


def _require_strategy(policy_state: PolicyState, membership: Membership) -> None:
    workers = None if membership.is_elastic else membership.workers.world_size  # None: others may come
    policy_state.constraints.require(policy_state.strategy, workers)


def _besides(policy_state: PolicyState, execution: Execution) -> dict[str, Any]:
    checking = {"checked bytes": execution.checked_bytes, "audit": execution.audit}
    about = {"script": script_digest(), "policies": policy_state.names, "strategy": str(policy_state.strategy)}
    return about | checking


def _policy_state(
    policies: Sequence[Policy],
    settings: Settings,
    fault_tolerance: FaultTolerance,
    constraints: StrategyConstraints,
    job: Job,
    given: Strategy | str | None,
) -> PolicyState:
    named = policies_named(settings.policies, job.batch_size)
    together = settings.batch_scale.policies([*policies, *named], job.batch_size)
    strategy = strategy_of(given or settings.strategy or AllReduce())
    return PolicyState(
        together,
        job.batch_size,
        job.shards,
        balances=fault_tolerance.balances,
        strategy=strategy,
        constraints=constraints,
    )


def _number(settings: Settings) -> int:
    number = next(_runs)
    if number > 1 and settings.coordinator is not None:
        raise JobError(
            "a script whose workers may change has one run: this is its second unisono.init. Start the second run in a "
            "script of its own, or both with unisono run -n N, without a range and without --max-restarts"
        )
    return number


def _folder(argument: str | Path | None, settings: Settings, number: int) -> Path | None:
    # Under `unisono verify` and `unisono study` even a script that names its folder must leave that one alone.
    if argument == "":
        raise JobError('run_dir="" names no folder: name one (the working folder is "."), or leave it out')
    if argument is not None and settings.trace is None and not settings.study:
        return Path(argument)
    # A script that starts several runs has one folder from its launcher: the later ones go inside of it.
    if settings.run_dir is None or number == 1:
        return settings.run_dir
    return settings.run_dir / f"run-{number}"


def _checkpoints(folder: RunFolder, keep: int, every: int | None) -> Checkpoints:
    return Checkpoints(
        partial(CheckpointStore, folder.checkpoints, keep=keep, on_event=folder.journal, writer=folder.writer),
        every=every,
    )


def _checkpoint_every(argument: int | None, keep: int, settings: Settings) -> int | None:
    every = _first(argument, settings.checkpoint_every)
    for name, value in {"checkpoint_every": every, "keep": keep}.items():
        if value is not None and not value > 0:
            raise JobError(f"{name}={value!r}: needs to be positive")
    return every


def _monitoring(argument: int | Monitoring, settings: Settings, policy_state: PolicyState) -> Monitoring:
    if isinstance(argument, Monitoring):
        return argument
    return Monitoring(argument or settings.monitor_every or int(policy_state.needs_monitor))


def _announce(run: Run, environment: Environment) -> None:
    if not run.is_main:
        return
    run.inside.folder.journal("started", world_size=run.world_size, launcher=environment.launcher, pid=os.getpid())
    print(  # noqa: T201  the choice of launcher is something to see
        f"unisono: launched by {_launched(run, environment)}; {run.job.shards} shards, batch {run.job.batch_size}, "
        f"{run.job.threads} thread{'s' if run.job.threads > 1 else ''} per worker, {run.device}, run folder {run.dir}",
        file=sys.stderr,
        flush=True,
    )


def _launched(run: Run, environment: Environment) -> str:
    if not run.inside.membership.is_elastic:
        return environment.describe()
    return f"unisono: {run.world_size} workers to begin with, elastic"
