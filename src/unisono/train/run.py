"""The run: what a training script holds in its hand."""

from __future__ import annotations

import math
import platform
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, astuple
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.adapt.view import Setting, Timings
from unisono.checkpoint.snapshot import Digests
from unisono.checkpoint.store import Snapshot
from unisono.data.shards import Collate, ShardSource, ShardsRequest, check_dataset
from unisono.data.streams import generators_kept, seed_generators
from unisono.errors import DataError, Dismissed, JobError, JobMismatch, MemoryFault, ModelError, PolicyError
from unisono.failpoints import failpoint
from unisono.job import Job
from unisono.plan.audits import Finding
from unisono.plan.batches import Batches
from unisono.plan.links import Links
from unisono.plan.order import Stream, stream_seed
from unisono.received import value_of
from unisono.train.group.acts import Change, Recovers
from unisono.train.group.control import Flags
from unisono.train.group.majority import Verdict
from unisono.train.group.membership import Arrival, Membership
from unisono.train.group.signals import PREEMPTED
from unisono.train.group.workers import Operation, Workers
from unisono.train.loop.evaluation import Evaluator, Metrics, Predict
from unisono.train.loop.feed import feed, to_device
from unisono.train.loop.loop import Hooks, Load, Loop
from unisono.train.model.at_rest import Seen
from unisono.train.model.prepared import Prepared, refuse_unset_memory, tensors_by_name
from unisono.train.model.tensors import digest_tensors
from unisono.train.record.measurements import Pace, Stopwatch, peak_memory, reduction_probe
from unisono.train.record.notices import Notices
from unisono.train.record.observers import Callback, Event, Observers
from unisono.train.record.recorder import Recorder, StepLine, round_figures
from unisono.train.record.results import Results
from unisono.train.record.sample_log import SampleLog
from unisono.train.record.trace import Trace
from unisono.train.recovery.integrity import Integrity, Note
from unisono.train.state.checkpoints import Checkpoints
from unisono.train.state.ending import Ending
from unisono.train.state.first_weights import FirstWeights
from unisono.train.state.monitors import NAMES
from unisono.train.state.state import Progress, Reading
from unisono.train.state.trained import Trained
from unisono.train.steering import Steering
from unisono.train.step.engine import Attempt, Call, Clip, LossFunction, StepEngine
from unisono.train.step.loss import require_agreement
from unisono.train.step.step import Step
from unisono.train.step.surroundings import Surroundings
from unisono.train.strategies.apart import Apart, serve

RESERVED = frozenset(
    (
        *("step", "epoch", "position", "loss", "losses", "lr", "generation", "world_size", "seconds", "samples_per_s"),
        *("batch_size", "shards", "ends_epoch", "learning_rate", "lr_factor", "workers", "links", "setting"),
        *("norms", "strategy", "round"),
        *NAMES,
    )
)
"""What lines of ``metrics.jsonl`` have."""

Computed = tuple[float, dict[str, float], dict[str, Any]]
"""What a call of ``step.run`` came to: the loss, metrics, and figures that were measured."""

M = TypeVar("M")
O = TypeVar("O")  # noqa: E741


class Run:
    """One training run, as one of its workers sees it. Made by :func:`unisono.init`."""

    def __init__(
        self, job: Job, membership: Membership, device: torch.device, checkpoints: Checkpoints, around: Surroundings
    ) -> None:
        self.job = job
        self.device = device
        self._membership = membership
        self._acts = around.acts.changing(_Recovery(self))
        self._around = around
        self._checkpoints = checkpoints
        self._recorder = Recorder(around.folder, writes=self.is_main)
        if self.is_main:
            checkpoints.begin_writing()
        self._trace = Trace.open(around.settings.trace, self.rank)
        self._samples = self._open_samples(around)
        self._ending = Ending(around.opened)
        self._observers = Observers()
        self._adaptation = around.adaptation
        about = {"job": job.model_dump(mode="json"), "fingerprint": around.fingerprint}
        self._trained = Trained(about, self._adaptation)
        self._first_weights = FirstWeights(
            self._trained,
            checkpoints,
            around.folder,
            around.fingerprint,
            allow_job_change=around.settings.allow_job_change,
        )
        self._evaluator = Evaluator(job, device, self._trained, self._acts)
        self._results = Results(around.folder, self._trained, membership)
        self._steering = Steering(job, self._trained, membership, checkpoints, self._recorder, around, self._acts)
        self._engine: StepEngine | None = None
        timeout_s = around.care.failure_timeout_s
        self._apart = Apart(job, device, self._trained, membership, self._acts, timeout_s)
        audits = around.execution.audit > 0
        self._integrity = Integrity(
            self._trained,
            around.care.verify_every,
            self._mend,
            self._has_flipped,
            audits=audits,
            shares=around.execution.shard_optimizer,
        )
        self._strategy = self._adaptation.strategy  # that engine or rounds were made for
        self._source: ShardSource | None = None
        self._loops = 0
        self._line = StepLine()
        self._live: weakref.ref[Generator[Step, None, None]] | None = None
        self._step: Step | None = None
        self._computing = False  # from the call of step.run until its commit
        self._leaving = self._comes_together = False
        self._has_lost = False  # made an update, with an engine before, from a gradient that memory had not kept
        self._regroups = False
        self._seconds: dict[str, float] = {}
        self._pace = Pace()
        self._stopwatch = Stopwatch()
        self._notices = Notices(job, around.folder)
        self._ending.also(self._close_parts)

    # -- who and where ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's place in the roster, 0 … world_size-1; -1 as long as it has yet to join the others."""
        return -1 if self._membership.joins else self._workers.rank

    @property
    def world_size(self) -> int:
        """The number of workers; 0 as long as this one has yet to join them."""
        return 0 if self._membership.joins else self._workers.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and writes files (rank 0)."""
        return self.rank == 0

    @property
    def generation(self) -> int:
        """The number of the roster's generation, from 1; 0 as long as this worker has yet to join."""
        return self._workers.generation.number

    @property
    def dir(self) -> Path:
        """The run folder."""
        return self._around.folder.path

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The newest line of ``metrics.jsonl``."""
        return self._recorder.latest

    @property
    def strategy(self) -> str:
        """By which the workers synchronise now, as its text."""
        return str(self._strategy)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main worker alone."""
        if self.is_main:
            print(*values, **{"flush": True, **options})  # noqa: T201  this is the verb for it

    def on(self, event: Event, callback: Callback) -> None:
        """Have ``callback(run, step)`` called on this worker whenever something happens in its loops.

        Args:
            event: ``step_begins``: the step's samples are loaded, nothing of it is computed. ``step_computed``: this
                worker has computed its shards (in ``step.computed_s`` seconds) and has yet to add the others'; once
                per call of ``step.run``, again if that is repeated after a loss. ``step_ends``: it is committed, and
                the loop's body is done.
            callback: called on the main thread, in the order of the calls of ``on``. It must leave the weights alone
                and draw no random numbers, or the bits are other ones. What it raises is raised in the loop.

        Raises:
            JobError: there is no such event; lists those that there are.
        """
        self._observers.add(event, callback)

    # -- what is trained -------------------------------------------------------------------------------------

    def prepare(self, model: M, optimizer: O) -> tuple[M, O]:
        """Give every worker the same weights, and get ready to train them.

        Args:
            model: a module, or a list of them; moved to ``run.device``.
            optimizer: an optimizer, or a list of them, over the model's parameters.

        Returns:
            the same objects. A run that resumes has its weights in them.

        Raises:
            ModelError: nothing to train.
            JobMismatch: the workers hold different models; names the first difference.
            CheckpointError: the run folder's checkpoint holds another model.
        """
        modules: list[nn.Module] = list(model) if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]
        for module in modules:
            if isinstance(module, nn.Module):
                module.to(self.device)
        optimizers: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        prepared = Prepared.of(model, optimizers)
        if self.job.deterministic:
            refuse_unset_memory(prepared.optimizers)
        self._before_call()
        self._acts.agree("model", prepared.layout())
        is_first, self._trained.prepared = self._trained.prepared is None, prepared
        self._acts.change(partial(self._first_weights.act, prepared, resumes=is_first))
        self._acts.together(self._made_engine)
        if self.is_main:
            self._notices.small_batch_norm(prepared)
        if self._trace is not None:
            self._trace.step(self._trained.progress.position.step, prepared.tensors())
        return model, optimizer

    def register(self, name: str, thing: Any) -> Any:
        """Make an object part of every checkpoint: a scheduler, a counter, an average of the weights.

        Args:
            name: to find it again.
            thing: has ``state_dict()`` and ``load_state_dict(state)``.

        Returns:
            the object.

        Raises:
            JobError: the name is taken, or the object lacks one of the two methods.
        """
        self._trained.registered.add(name, thing)
        return thing

    # -- training --------------------------------------------------------------------------------------------

    def steps(
        self,
        dataset: Any,
        epochs: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        loader_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> Generator[Step, None, None]:
        """The steps of a training loop, one per global batch.

        A run that resumes yields only what is left. Samples are shared out among workers by index, before they
        are loaded. After a fault of the memory that cannot be healed, steps come again: from the newest state on that
        is known to be right.

        Args:
            dataset: map-style, with a length.
            epochs: passes over it.
            shuffle: in an order that follows from the seed and the epoch.
            drop_last: leave out a last, smaller batch instead of weighting it by its size.
            loader_workers: processes of this worker that load ahead, over all epochs; 0 loads in this process, while
                no step is computed. Decides no bit.
            collate_fn: makes a batch of a list of samples; torch's ``default_collate`` by default.

        Raises:
            DataError: the data set is empty or has no length, a batch cannot be collated, or a loader process failed,
                died or gave nothing for as long as ``failure_timeout_s``.
            JobError: ``loader_workers`` is no number of processes.
            JobMismatch: the data set differs between workers, or from the one that a checkpoint was reading.
            SystemExit: with code 75, after a checkpoint, when a worker was asked to leave.
        """
        self._require_prepared()
        if self._step is not None:
            raise JobError("run.steps inside of another run.steps: one loop at a time; end the first one before")
        if loader_workers < 0:
            raise JobError(f"loader_workers={loader_workers}: use 0 to load in this process, or a number of processes")
        samples = check_dataset(dataset)
        self._before_call()
        self._acts.agree("data set", {"number of samples": samples})
        batches = Batches(samples, self.job.batch_size, self.job.shards, drop_last)
        if not batches.per_epoch:
            raise DataError(
                f"drop_last leaves nothing of {samples} samples with batch_size={self.job.batch_size}: "
                f"keep the last, smaller batch, or lower batch_size"
            )
        reading = Reading(samples, shuffle, drop_last)
        source = ShardSource(dataset, self.job.seed, collate_fn, shuffle)
        timeout_s = self._around.care.failure_timeout_s
        load = partial(feed, source, workers=loader_workers, timeout_s=timeout_s, device=self.device)
        live = self._loop(batches, reading, epochs, load, source)
        self._live = weakref.ref(live)  # a break lets go of the last one that holds it, and so ends the loop
        return live

    def log(self, name: str, value: Any) -> None:
        """Log a metric.

        Inside of a loss function: the mean over the shard's samples; what is written is the mean over the global
        batch, weighted like the loss. While the run evaluates or predicts: nothing, since metrics do that there.
        Elsewhere: a number of the run as a whole.

        Args:
            name: any that ``metrics.jsonl`` does not use for itself.
            value: a number, or a tensor with one element.

        Raises:
            JobError: the name is taken.
        """
        if name in RESERVED:
            raise JobError(f"run.log({name!r}): metrics.jsonl uses this name for itself; choose another")
        if self._evaluator.is_under_way:
            return
        number = float(value)
        computes = self._apart.rounds or self._engine
        if computes is None or not computes.log(name, number):
            self._recorder.write({"step": self._trained.progress.position.step, name: number})

    # -- beside training -------------------------------------------------------------------------------------

    def evaluate(
        self,
        dataset: Any,
        metrics: Metrics,
        *,
        batch_size: int | None = None,
        collate_fn: Collate | None = None,
    ) -> dict[str, float]:
        """Means over a whole data set, shared out among the workers: the same bits on any number of them.

        The model is in evaluation mode meanwhile, and no gradients are computed.

        Args:
            dataset: map-style, with a length.
            metrics: ``metrics(model, batch) -> {name: mean}``, or a dict of functions that each return a mean; a
                mean that is not over samples is returned as ``(mean, weight)``.
            batch_size: samples per call; by default as many as a training shard has.
            collate_fn: as in :meth:`steps`.

        Returns:
            the mean of each metric over all samples, weighted by the batches' sizes or weights.
        """
        self._require_prepared()
        self._before_call()
        return self._evaluator.carry_out(lambda one: one.means(metrics), dataset, batch_size, collate_fn)

    def predict(
        self,
        dataset: Any,
        predict_fn: Predict | None = None,
        *,
        batch_size: int | None = None,
        collate_fn: Collate | None = None,
    ) -> Any:
        """The model's outputs for a whole data set, in its order, on every worker.

        Args:
            dataset: map-style, with a length.
            predict_fn: ``predict_fn(model, batch)`` returns a tensor, or lists or dicts of tensors, with one row per
                sample; by default the model is called with the batch, or with its first part if it has several.
            batch_size: samples per call.
            collate_fn: as in :meth:`steps`.

        Returns:
            what ``predict_fn`` returns, with one row per sample of the data set.
        """
        self._require_prepared()
        self._before_call()
        return self._evaluator.carry_out(lambda one: one.outputs(predict_fn), dataset, batch_size, collate_fn)

    def all_reduce(self, value: Any, operation: Operation = "mean") -> Any:
        """Combine one number or tensor per worker: ``mean``, ``sum``, ``max`` or ``min``."""
        self._before_call()
        return self._acts.together(lambda workers: workers.all_reduce(value, operation))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value that the worker ``source`` has: a tensor, a number, text, or lists and dicts of them."""
        self._before_call()
        return self._acts.together(lambda workers: workers.broadcast(value, source))

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self._before_call()
        self._acts.together(lambda workers: workers.barrier())

    # -- keeping ---------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write a checkpoint: at the end of the loop's body if a step is under way, else now.

        Every worker calls it: it is written when all hold the same state.
        """
        self._checkpoints.requested = True
        if self._step is None:
            self._before_call()
            self._checkpoint_if_due(self._require_right())

    def resize(self, workers: int) -> None:
        """Ask for another number of workers, from one of the next steps on.

        Every worker calls it, as it comes by. The job goes on meanwhile; more workers than there is room for, or than
        the job allows, are not given.

        Args:
            workers: at least 1.

        Raises:
            JobError: the workers of this job stay the same, or the number is below 1; says what to do.
        """
        self._ending.require_open()
        if workers < 1:
            raise JobError(f"run.resize({workers}): at least 1 worker is needed")
        if not self._membership.joins:  # the others have asked already
            self._membership.resize(workers)

    def finish(self, model: nn.Module | Sequence[nn.Module] | None = None) -> str:
        """End the run: write ``result.json``, print the weights' digest on the main worker.

        Args:
            model: the module, or list of them, whose digest is meant; by default everything that was prepared.

        Returns:
            the sha256 of the weights, in hex.

        Raises:
            JobMismatch: the workers' weights differ, which must not happen.
        """
        prepared = self._require_prepared()
        if (live := self._newest_loop) is not None:
            live.close()  # a loop that was left, and whose steps somebody still holds
        if self._membership.joins:
            self._acts.await_end()
        self._before_call()
        if self._engine is not None:
            self._engine.require_whole()
            if self._engine.has_lost and not self._integrity.is_on:
                raise MemoryFault(
                    f"rank {self.rank} made an update from a gradient that memory had not kept, so the weights are "
                    f"wrong: start the job again, it goes on from its last checkpoint"
                )
        self._steering.end()
        self._settle(is_end=True)
        verified = self._require_right()
        weights = digest_tensors(prepared.tensors() if model is None else tensors_by_name(model))
        self._acts.agree("set of weights", {"sha256": weights})
        # What follows on any worker may read what the main worker wrote: if that one is lost in it, the next one does.
        self._acts.together(partial(self._conclude, weights, verified))
        self._membership.finished(weights)
        self.print(f"weights sha256 {weights}")
        self.close()
        return weights

    def _conclude(self, weights: str, verified: Digests | None, workers: Workers) -> None:
        if self.is_main:
            self._around.folder.ready(self._around.care.failure_timeout_s)
        if self._checkpoints.in_use:
            self._checkpoints.save(self._snapshot(), verified)
        self._checkpoints.close()
        about: dict[str, Any] = {"workers": workers.gather_json(peak_memory(self.device))}
        if self._around.settings.study:
            trained = self._require_prepared().parameters.values()
            about["gradient_bytes"] = sum(each.numel() * each.itemsize for each in trained)
            about["reduction"] = reduction_probe(workers, self.job.reduction, self.device)
        if self.is_main:
            self._results.finished(weights, about)
        workers.barrier()

    def close(self) -> None:
        """Let go of connections, files and torch's switches. ``finish`` does it; not collective."""
        self._ending.close()

    def _close_parts(self) -> None:
        if (live := self._newest_loop) is not None and getgeneratorstate(live) != GEN_RUNNING:
            live.close()  # it may have loader processes
        self._drop_engine()
        if self._trace is not None:
            self._trace.close()
        if self._samples is not None:
            self._samples.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- the inside ------------------------------------------------------------------------------------------

    def _compute(
        self, step: Step, loss_fn: LossFunction, optimizer: Optimizer | Sequence[Optimizer] | None, clip: Clip
    ) -> float:
        prepared = self._require_prepared()
        if step is not self._step:
            raise JobError("this step is over: call step.run in the body of the loop that it came from")
        if self._trained.is_doubted:  # the run goes back at the end of the body
            return float(self.metrics.get("loss", math.nan))
        prepared.check_unchanged()
        self._trained.require_same_trained()
        self._computing = True
        optimizers = _chosen(prepared, optimizer)
        if self._apart.rounds is not None:
            return self._compute_apart(step, loss_fn, optimizers, clip)
        train = partial(self._train, step, loss_fn, optimizers, clip)
        self._seconds = {}
        loss, metrics, figures = self._acts.change(train)
        self._computing = False
        step.metrics |= metrics
        if self._trained.is_doubted:
            return float(loss)
        self._note(optimizers, loss, {**metrics, **figures})
        self._recorder.step_ran()
        return float(loss)

    def _compute_apart(self, step: Step, loss_fn: LossFunction, optimizers: tuple[Optimizer, ...], clip: Clip) -> float:
        """This worker's part of a step, by itself."""
        assert self._source is not None, "a step comes from a loop"

        def call(part: range, shards: Sequence[Any]) -> Call:
            batch = step.batch.part(part)
            computed = partial(self._computed, step, len(part))
            about = (step.number, step.calls, batch, shards, loss_fn, optimizers, clip, part.start)
            return Call(*about, computed=computed)

        own = self._apart.compute(step, call, self._source)
        self._computing = False
        step.metrics |= own.mean_metrics
        self._seconds = own.seconds
        if own.samples:
            self._note(optimizers, self._apart.loss, own.mean_metrics)
        self._recorder.step_ran()
        return self._apart.loss

    def _train(
        self, step: Step, loss_fn: LossFunction, optimizers: tuple[Optimizer, ...], clip: Clip, workers: Workers
    ) -> Change[Computed]:
        if (doubt := self._integrity.settle_suspicion(workers, (step.number, step.calls))) is not None:
            return self._doubted(doubt)
        engine = self._require_engine()
        shards = [to_device(shard, self.device) for shard in step.shards]
        generation, mine = workers.generation, self._shards_of(step.batch.shards)
        call = Call(
            step.number,
            step.calls,
            step.batch,
            shards,
            loss_fn,
            optimizers,
            clip,
            load=partial(self._load, step),
            is_last=step.is_last,
            decided=self._adaptation.digest,
            computed=partial(self._computed, step, len(mine)),
        )
        if self._samples is not None:
            self._samples.computed(step.number, step.calls, generation.number, step.batch, mine)
        try:
            attempt = engine.attempt(call, self._flags)
        except PolicyError:
            self._steering.refuse(step.number)
        except MemoryFault:
            self._discard_unconfirmed()
            raise
        place = step.number, step.calls
        audited, wrong = self._audited(workers, attempt.findings)
        if wrong:
            return self._doubted(audited, wrong)
        verdict, note = self._integrity.judge(place, attempt.flags)
        if verdict is not Verdict.RIGHT:
            engine.discard()
            doubt = self._integrity.settle_majority(workers, place) if verdict is Verdict.HEALING else note
            return self._train(step, loss_fn, optimizers, clip, workers) if doubt is None else self._doubted(doubt)
        while self.is_main and workers.transport.measured:
            self._around.folder.journal("topology", **workers.transport.measured.pop(0))
        if self._trace is not None:
            self._trace.call(call, mine, attempt.report)
        update = engine.work_out(call, attempt)
        make = partial(self._update, step, attempt, update, self._setting(workers))

        def make_noted() -> Computed:
            found = make()
            audited()
            note()
            return found

        return Change(make_noted, partial(self._updated, step, attempt, is_skipped=update is None))

    def _doubted(self, note: Note, replaced: Sequence[int] = ()) -> Change[Computed]:
        """A call has shown that the state is not to be gone on from: what it has computed is not used.

        Args:
            note: doubts the state.
            replaced: ranks of workers that compute wrongly, and are to leave.
        """
        generation = self._workers.generation.number

        def make() -> Computed:
            note()
            self._regroups = self._regroups or bool(replaced)
            return float(self.metrics.get("loss", math.nan)), {}, {}

        def then() -> None:
            for rank in replaced:
                self._membership.replace(generation, rank)

        return Change(make, then)

    def _update(self, step: Step, attempt: Attempt, update: Callable[[], None] | None, setting: Setting) -> Computed:
        """Make the update of a step, and note what is known of it as long as its weights are."""
        if update is not None:
            update()
        self._hears(leave=attempt.report.leave, regroup=attempt.report.regroup)
        if not step.calls:
            self._trained.monitors.time(setting, [flags.timings for flags in attempt.flags])
        if update is None:
            return math.nan, attempt.report.metrics, {}
        return attempt.report.loss, attempt.report.metrics, self._figures(step, attempt)

    def _hears(self, *, leave: bool, regroup: bool) -> None:
        """A worker was asked to leave, and the job with it, or a new generation is due. In a change, on all workers."""
        self._leaving, self._regroups = self._leaving or leave, self._regroups or regroup

    def _updated(self, step: Step, attempt: Attempt, *, is_skipped: bool) -> None:
        """The update of a step is made on this worker, and counted."""
        if self._samples is not None:
            self._samples.committed(step.number, step.calls, self.generation)
        if self.is_main:
            self._notices.memory_shared(self._require_engine().bytes_shared)
        self._seconds = attempt.seconds
        self._pace.note(attempt.seconds["compute"], len(self._shards_of(self.job.shards)))
        if is_skipped and self.is_main:
            self._notices.skipped(step.number, attempt.report)

    def _load(self, step: Step, shard: int) -> Any:
        """The batch of any shard, whoever computes it."""
        assert self._source is not None, "a step comes from a loop"
        with generators_kept():
            (found,) = self._source.load(ShardsRequest(step.epoch, (step.batch.shard(shard),)))
        return to_device(found, self.device)

    def _figures(self, step: Step, attempt: Attempt) -> dict[str, Any]:
        """What is measured of a call, besides its loss."""
        found: dict[str, Any] = {}
        if attempt.norms is not None:
            losses = [part.loss for part in attempt.report.shards if part.weight]
            found |= self._trained.monitors.see(step.number, attempt.norms, losses)
            found |= {} if self._adaptation.is_empty else {"norms": asdict(attempt.norms)}
        is_told = attempt.norms is not None or not self._adaptation.is_empty or self._around.settings.study
        if is_told and not step.calls:
            found |= self._trained.monitors.times
        return found

    def _setting(self, workers: Workers) -> Setting:
        return Setting(
            generation=workers.generation.number,
            world_size=workers.world_size,
            batch_size=self._adaptation.batch_size,
            shards=self._adaptation.shards,
            topology=workers.transport.topology,
            departures=workers.generation.departures,
        )

    def _shards_to_load(self) -> range:
        """Which shards of the next step are this worker's, as far as that is known beforehand."""
        rounds = self._apart.rounds
        return range(0) if rounds is not None and rounds.shares_work else self._shards_of(self._adaptation.shards)

    def _shards_of(self, shards: int) -> range:
        """Which of so many shards this worker computes."""
        return self._workers.split(shards).of(self._workers.rank)

    def _computed(self, step: Step, shards: int, seconds: float) -> None:
        step.computed_s = seconds
        begun = perf_counter()
        self._stopwatch.formed_s, self._stopwatch.checkpoint_s = self._acts.formed_s, self._checkpoints.seconds
        self._observers.tell("step_computed", self, step)
        seconds += perf_counter() - begun
        self._stopwatch.shard_s = seconds / shards if shards else 0.0

    def _mend(self, workers: Workers, arrival: Arrival, what: str) -> None:
        """Some workers hold another state than most: they get the right one."""
        failpoint("heal begins")
        hosts = workers.gather_json(platform.node())
        odd = sorted(arrival.behind)
        if self.is_main:
            step = self._trained.progress.position.step
            self._notices.healed(step, what, odd, [hosts[rank] for rank in odd])
        given = workers.broadcast(self._give() if self.rank == arrival.source else None, arrival.source)
        if self.rank in odd:
            self._take(given, joins=False)
        failpoint("healed")
        self._make_engine()

    def _found(self, finding: Finding) -> None:
        """Tell what an audit has come to. Collective; what follows from it comes with the call's change."""
        if finding.wrong is None:
            return
        host = self._workers.gather_json(platform.node())[finding.wrong]
        if self.is_main:
            self._notices.wrong_result(self._trained.progress.position.step, finding, host)

    def _audited(self, workers: Workers, findings: Sequence[Finding]) -> tuple[Note, list[int]]:
        """What follows from the audits of a call, and which workers compute wrongly. Collective.

        Raises:
            MemoryFault: one does, and the workers of this job stay the same; or there is no state to go back to.
        """
        computing = [rank for rank in range(workers.world_size) if self._computes(rank)]
        proofs = [finding for finding in findings if finding.is_proof]
        wrong = sorted({finding.wrong for finding in proofs if finding.wrong is not None})
        if not wrong:
            return self._integrity.audited(findings, computing), []
        self._require_engine().discard()
        host = workers.gather_json(platform.node())[wrong[0]]
        why = (
            f"step {self._trained.progress.position.step}: rank {wrong[0]} on host {host} computed shard "
            f"{proofs[0].shard} otherwise than the others, every time, so its processor or its memory is broken"
        )
        self._discard_unconfirmed()
        if not self._membership.is_elastic:
            raise MemoryFault(
                f"{why}. Start the job again without that host: checkpoints that may be wrong are removed"
            )
        return self._integrity.audited(findings, computing, why), wrong

    def _discard_unconfirmed(self) -> None:
        """Whoever starts the job again must not go on from what a worker that computes wrongly has left."""
        if (step := self._integrity.confirmed) is not None:
            self._checkpoints.discard_after(step)

    def _computes(self, rank: int) -> bool:
        return rank not in self._workers.transport.split.servers

    def _repeats(self, step: int) -> None:
        """A step is about to be computed again, since memory did not keep what was written to it."""
        if self.is_main:
            self._notices.repeated(step)

    def _flags(self, seen: Seen) -> Flags:
        # Asked for as late as can be: whoever wants in or out meanwhile need not wait for one step more.
        leaves = self._around.leave.requested and not self._membership.leave()
        return Flags(
            leaves,
            self._membership.is_due,
            flipped=seen.has_flipped,
            digest=seen.common,
            own=seen.own,
            timings=self._stopwatch.timings,
        )

    @property
    def _newest_loop(self) -> Generator[Step, None, None] | None:
        return None if self._live is None else self._live()

    @property
    def _workers(self) -> Workers:
        return self._membership.workers

    def _require_prepared(self) -> Prepared:
        self._ending.require_open()
        if self._trained.prepared is None:
            raise ModelError("call model, optimizer = run.prepare(model, optimizer) first")
        return self._trained.prepared

    def _require_engine(self) -> StepEngine:
        self._require_prepared()
        assert self._engine is not None
        return self._engine

    def _open_samples(self, around: Surroundings) -> SampleLog | None:
        if not around.settings.samples:
            return None
        seat = around.settings.coordinator
        return SampleLog(around.folder.path, f"rank-{self.rank}" if seat is None else seat.worker)

    def _make_engine(self) -> None:
        self._drop_engine()
        prepared, self._strategy = self._trained.prepared, self._adaptation.strategy
        if prepared is None or not self._trained.has_weights:
            return
        if (chosen := self._adaptation.topology) is not None:
            self._workers.transport.use_topology(chosen)
        if not serve(self._workers, self._strategy) and self.is_main:
            self._around.folder.journal("all compute", strategy=str(self._strategy), workers=self.world_size)
        if not self._strategy.is_exact:
            self._trained.anticipate()
        self._apart.make()
        if self._apart.rounds is None:
            self._engine = StepEngine(
                self.job,
                self._workers,
                prepared,
                self.device,
                self._around.execution,
                scaled=self._adaptation.scaled,
                found=self._found,
                repeats=self._repeats,
                has_lost=self._has_lost,
            )

    def _made_engine(self, workers: Workers) -> None:
        """Make what computes, as an act: so no worker goes on before all have."""
        self._make_engine()
        workers.barrier()

    def _drop_engine(self) -> None:
        self._apart.drop()
        if self._engine is not None:
            self._has_lost = self._engine.has_lost
            self._engine.close()
            self._engine = None

    def _settle(self, *, is_end: bool = False) -> None:
        """Restore the rest of a checkpoint, once the script has come to where it was written."""
        at = self._trained.progress
        is_there = self._loops > at.loop or (self._loops == at.loop and at.reading is None)
        if (is_there or is_end) and self._trained.settle():
            self._tell_of_scheduler()

    def _tell_of_scheduler(self) -> None:
        if self.is_main and not self._trained.registered:
            self._notices.unregistered_scheduler(self._require_prepared())

    def _loop(
        self, batches: Batches, reading: Reading, epochs: int, load: Load, source: ShardSource
    ) -> Generator[Step, None, None]:
        number, self._loops = self._loops, self._loops + 1
        settings = self._around.settings
        loop = Loop(number, reading, batches, epochs, settings.stop_after, settings.stop_after_epochs)
        self._results.batches = batches
        hooks = Hooks(
            shards=self._shards_to_load,
            compute=self._compute,
            move=self._move,
            begin=self._begin,
            end=self._end,
            enter=partial(self._enter_loop, joins=self._membership.joins),
            boundary=self._at_boundary,
            is_whole=lambda: not (self._computing or self._ending.is_closed or self._trained.is_doubted),
            shape=lambda: self._adaptation.shape,
            is_stopped=lambda: self._adaptation.stopped == number,
        )
        self._computing, self._source = False, source
        self._recorder.next_step()
        if self._samples is not None:
            self._samples.loop_begins(number, batches.samples, batches.epoch_samples, source.samples_at)
        if not self._acts.enter(number):
            self._seed_behind(number)
            return
        self._steering.begin()
        try:
            yield from loop.steps(self._trained.progress, load, hooks)
        except GeneratorExit:  # a break; or the end of a run that is closed in the middle of the loop
            if hooks.is_whole():
                self._acts.leave(number)
                self._seed_behind(number)
            raise
        self._acts.leave(number)
        self._seed_behind(number)

    def _seed_behind(self, loop: int) -> None:
        """Whoever has skipped the loop has to draw what the others draw."""
        seed_generators(stream_seed(self.job.seed, Stream.AFTER, loop))

    def _move(self, progress: Progress) -> None:
        self._trained.progress = progress

    def _begin(self, step: Step) -> None:
        self._settle()
        self._trained.go_on()  # all have agreed on the loop
        self._step = step
        self._recorder.step_loaded()
        seed_generators(stream_seed(self.job.seed, Stream.SCRIPT, step.number))
        self._line.begin(step, adapts=not self._adaptation.is_empty)
        if self._engine is not None:
            self._engine.step_begins()
        self._observers.tell("step_begins", self, step)

    def _end(self, after: Progress | None) -> None:
        step, self._step = self._step, None
        if after is None or step is None or self._trained.is_doubted:
            return
        self._trained.progress = after
        self._acts.step = after.position.step
        settled = self._settles(step)
        if self._steering.links_are_due() or self._around.execution.monitoring.measures_links(self._acts.step):
            self._measure_links()
        if self._line.is_computed:
            self._recorder.step_ends(self._line.values | self._steering.rates, step.size)
            self._stopwatch.step_ends(self.metrics["seconds"], self._workers.transport.traffic.take())
        shard_s = self._pace.shard_s if self._adaptation.balances else 0.0
        self._membership.tell(self._acts.standing, float(self.metrics.get("samples_per_s", 0.0)), shard_s)
        if self._trace is not None:
            self._trace.step(after.position.step, self._require_prepared().tensors())
        self._observers.tell("step_ends", self, step)
        if settled:
            self._steering.step_ends(step)
            self._follow_strategy()

    def _settles(self, step: Step) -> bool:
        """Whether all workers have the same weights after a step that is over."""
        rounds = self._apart.rounds
        if rounds is None:
            return True
        ends = (
            step.is_last_in_epoch
            or (step.number + 1) % rounds.strategy.round_steps == 0
            or self._leaving
            or self._regroups
            or self._checkpoints.due(step.number + 1)
        )
        self._apart.step_ends(step.number, ends_round=ends)
        if ends:
            self._come_together()
        return ends

    def _together(self, told: Sequence[Mapping[str, Any]]) -> None:
        """What workers say when they come together. In the change with which they do."""
        self._hears(leave=any(one["leave"] for one in told), regroup=any(one["regroup"] for one in told))
        self._trained.monitors.time(self._setting(self._workers), [Timings(*one["timings"]) for one in told])

    def _come_together(self) -> None:
        """The round is over, if one is under way: all workers have the same weights afterwards."""
        if not self._apart.is_open or self._comes_together:
            return
        self._comes_together = True
        try:
            told = self._apart.come_together(self._trained.progress.position.step, self._told, self._together)
        finally:
            self._comes_together = False
        self._note_round(told)

    def _told(self) -> dict[str, Any]:
        flags = self._flags(Seen())
        return {"leave": flags.leave, "regroup": flags.regroup, "timings": astuple(flags.timings)}

    def _note_round(self, told: Sequence[Mapping[str, Any]]) -> None:
        if not self._line.values or not any(one["samples"] for one in told):
            return
        loss, about = round_figures(told, str(self._strategy))
        times = {} if self._adaptation.is_empty else self._trained.monitors.times
        self._line.values.pop("loss", None)  # that of this worker's part of the newest step
        self._note(self._require_prepared().optimizers, loss, {**about, **times})

    def _follow_strategy(self) -> None:
        """Policies may have chosen another strategy."""
        is_new = self._adaptation.strategy != self._strategy
        if is_new or (self._apart.rounds is not None and not self._adaptation.is_empty):
            self._acts.together(self._switch)

    def _switch(self, workers: Workers) -> None:
        try:
            require_agreement(workers.transport, self._adaptation.digest)
        except PolicyError:
            self._steering.refuse(self._trained.progress.position.step)
        if self._adaptation.strategy != self._strategy:
            self._make_engine()

    def _measure_links(self) -> None:
        self._before_call()
        measured = self._acts.together(_measured_links)
        if measured is not None:
            self._trained.monitors.links = Links.from_json(measured)
            self._line.values["links"] = measured

    def _before_call(self) -> None:
        """A collective call follows, for which all workers need to hold the same weights.

        Whoever joins makes none, but hears of it from the others.

        Raises:
            JobMismatch: it has left the loop in which the run was about to go back to an older state.
        """
        self._ending.require_open()
        if self._membership.joins:
            return
        doubt = self._trained.doubt
        if doubt is not None and self._step is None:
            raise JobMismatch(
                f"{doubt.why}, and the script has left the loop before the steps since then could be computed again: "
                f"start the job again, it goes on from its newest verified checkpoint"
            )
        self._come_together()

    def _enter_loop(self, *, joins: bool) -> None:
        """A loop begins. Whoever joins in the middle of it finds it compared."""
        if not joins:
            self._before_call()
            self._require_right()

    def _at_boundary(self, is_end: bool) -> Progress:
        """The body is done, or the loop. Every worker stands here, and has the same state unless a round is open."""
        step = self._trained.progress.position.step
        if not self._trained.is_doubted and not self._apart.is_open:
            is_due = self._leaving or self._regroups or self._integrity.due(step) or self._checkpoints.due(step)
            verified = self._verify() if is_due or is_end else None
            if self._leaving and not is_end and not self._trained.is_doubted:
                self._depart(verified)
            if not is_end:
                self._checkpoint_if_due(verified)
        if is_back := self._trained.is_doubted:
            self._go_back()
        if self._regroups and (is_back or not is_end) and not self._apart.is_open:
            self._acts.regroup(None, at_boundary=True)
        return self._trained.progress

    def _require_right(self) -> Digests | None:
        """Compare the whole state outside of steps, where nothing can be computed again.

        Raises:
            JobMismatch: the workers hold different states, and nobody can say who is right.
        """
        verified = self._verify()
        if (doubt := self._trained.doubt) is not None:
            raise JobMismatch(f"{doubt.why}: start the job again, it goes on from its newest verified checkpoint")
        return verified

    def _has_flipped(self) -> bool:
        if self._engine is None:
            return False
        return self._engine.has_lost or (not self._integrity.script_writes and self._engine.has_flipped)

    def _verify(self) -> Digests | None:
        """Compare the whole state, and keep it if it is right.

        Returns:
            what all agree on; nothing if the state is doubted, or nothing is compared.
        """
        self._settle()
        if not self._integrity.is_on:
            return None
        step, is_apart = self._trained.progress.position.step, self._apart.rounds is not None
        # What stands before a loop that goes on later is no state to keep: the rest of it is yet to be restored.
        weights_only = is_apart or self._trained.restored is not None
        digests = self._acts.change(lambda workers: self._integrity.compare(workers, step, weights_only=weights_only))
        if self._trained.is_doubted:
            return None
        if not weights_only:
            self._integrity.copy(step, self.rank)
        return digests

    def _go_back(self) -> None:
        """The state is doubted: go on from the newest one that was right."""
        doubt, reached = self._trained.doubt, self._trained.progress.position.step
        assert doubt is not None, "there is a reason"

        def retrieve(workers: Workers) -> Change[None]:
            return Change(partial(self._set_back, self._integrity.retrieve(workers)))

        self._acts.change(retrieve)
        self._acts.together(self._made_engine)
        step = self._acts.step = self._trained.progress.position.step
        self._discard_unconfirmed()
        self._recorder.go_back()
        if self.is_main:
            self._around.folder.metrics.truncate_after(step - 1)
            self._notices.rolled_back(reached, step, doubt)

    def _set_back(self, snapshot: Snapshot) -> None:
        self._trained.go_back(snapshot)
        self._drop_engine()
        self._has_lost = False

    def _dismiss(self, dismissed: Dismissed) -> NoReturn:
        """The others go on without this worker, or the job does later."""
        if dismissed.preempted:  # at a boundary, where all has just been compared
            self._depart(self._integrity.agreed(self._trained.progress.position.step))
        self._ending.leave(dismissed)

    def _give(self) -> list[Any]:
        """The state, for a worker that lacks it, and all else that decides what comes next."""
        return [self._trained.give(), self._integrity.give(), self._leaving]

    def _digests(self) -> list[int] | None:
        """Of what an update changes, where all who have made the same updates hold the same."""
        is_alike = self._trained.has_weights and self._strategy.is_exact and not self._trained.is_doubted
        return list(self._trained.capture().digests().values()) if is_alike and self._integrity.is_on else None

    def _gives_alone(self) -> None:
        if (digests := self._digests()) is not None:
            self._integrity.suspect(self._trained.progress.position.step, digests)

    def _take(self, given: Sequence[Any], *, joins: bool) -> None:
        """Set the state that another worker has given."""
        form = tuple[list[Any], dict[str, Any], bool]
        state, known, self._leaving = value_of(form, given, "what another worker gave")
        self._apart.forget()
        self._trained.take(state, joins=joins)
        self._integrity.take(known)
        self._trained.has_weights = True
        self._has_lost = False  # whatever this worker made an update from, the weights are another one's

    def _renew(self) -> None:
        """A new generation, in which everybody has the same state."""
        self._regroups = False
        self._integrity.regroup()
        self._make_engine()
        if self.is_main:
            self._recorder.take_over()
            self._checkpoints.begin_writing()

    def _depart(self, verified: Digests | None) -> NoReturn:
        step = self._trained.progress.position.step
        written = self._checkpoints.save(self._snapshot(), verified, wait=True)
        if self.is_main:
            self._results.preempted()
        kept = f"checkpoint after step {step}" if written else f"NO checkpoint of step {step} could be written"
        self.print(f"unisono: asked to leave: {kept} in {self.dir}; start the job again to go on")
        self._ending.leave(Dismissed("asked to leave", preempted=True, code=PREEMPTED))

    def _checkpoint_if_due(self, verified: Digests | None) -> None:
        if self._trained.restored is not None:  # the script has not come to where the newest one was written
            self._checkpoints.requested = False
        elif self._checkpoints.due(self._trained.progress.position.step) and not self._trained.is_doubted:
            self._checkpoints.save(self._snapshot(), verified)

    def _snapshot(self) -> Snapshot:
        self._settle()
        self._tell_of_scheduler()
        if self._engine is not None:
            self._engine.require_whole()
        return self._trained.capture()

    def _note(self, optimizers: Sequence[Optimizer], loss: float, metrics: Mapping[str, Any]) -> None:
        rate = float(optimizers[0].param_groups[0].get("lr", math.nan))
        about = {"generation": self.generation, "world_size": self.world_size, **metrics}
        self._line.computed(loss, rate, self._seconds, about)


class _Recovery(Recovers):
    """Keeps a run's state while workers come and go."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def leave(self) -> None:
        self._run._drop_engine()

    def give(self) -> list[Any]:
        return self._run._give()

    def take(self, given: Any, *, joins: bool) -> None:
        self._run._take(given, joins=joins)

    def renew(self) -> None:
        self._run._renew()

    def go_on(self) -> None:
        self._run._trained.go_on()

    def digests(self) -> list[int] | None:
        return self._run._digests()

    def gives_alone(self) -> None:
        self._run._gives_alone()

    def depart(self, dismissed: Dismissed) -> NoReturn:
        self._run._dismiss(dismissed)


def _measured_links(workers: Workers) -> dict[str, Any] | None:
    links = workers.transport.measure_links()
    workers.barrier()  # where there is nothing to measure, nobody has met the others yet
    return None if links is None else links.figures()


def _chosen(prepared: Prepared, optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    if optimizer is None:
        return prepared.optimizers
    chosen = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    for one in chosen:
        if not any(one is known for known in prepared.optimizers):
            raise ModelError(f"step.run(optimizer={type(one).__name__}): give it to run.prepare first")
    return chosen
