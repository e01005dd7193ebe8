"""The training loops of a run: what happens before, in and after each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from typing import Any, NoReturn

from torch.optim import Optimizer

from unisono.adapt.curvature import Curvature
from unisono.adapt.curvature_question import question_of
from unisono.adapt.view import BatchShape
from unisono.checkpoint.folder import ASKED, FOUND
from unisono.data.content import CONTENT, Contents, Glance
from unisono.data.feed import Asked, Feed
from unisono.data.loop_feeds import LoopFeeds
from unisono.data.shards import Source
from unisono.data.stream_feed import StreamFeed
from unisono.data.streams import seed_generators
from unisono.errors import JobError, ModelError
from unisono.jsonl import to_json
from unisono.plan.batches import Batches
from unisono.plan.links import Links
from unisono.plan.order import Stream, stream_seed
from unisono.received import read_object
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.workers import Workers
from unisono.train.loop.boundary import Boundary
from unisono.train.loop.course import Course, CutCourse
from unisono.train.loop.feed_checks import (
    require_batches,
    require_counts,
    require_shape,
    require_steps,
    require_strategy,
)
from unisono.train.loop.loop import Loop, LoopPlace
from unisono.train.loop.prefetch import prefetch
from unisono.train.loop.stream_course import StreamCourse
from unisono.train.model.own_update import OwnUpdate
from unisono.train.model.prepared import Prepared
from unisono.train.model.shared_work import sharing_in
from unisono.train.policy_runner import PolicyRunner
from unisono.train.record.metrics_line import MetricsLine
from unisono.train.state.state import Reading, RunProgress
from unisono.train.step.current import CurrentSteps, StepCall
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Clip, LossFunction, Step
from unisono.train.step.synchronisation import Synchronisation, Timer


@dataclass(eq=False)
class StepLoop:
    """Carries the loops of a run out, one at a time.

    Attributes:
        run: the base of the run.
        collectives: the collective calls.
        steps: the present step computer.
        synchronisation: the means by which workers get the same weights again.
        between: what happens between two steps.
        policy_runner: the policies at work.
        metrics: the writer of each step's line.
        timer: the timer of this worker's steps.
    """

    run: RunBase
    collectives: CollectiveCalls
    steps: CurrentSteps
    synchronisation: Synchronisation
    between: Boundary
    policy_runner: PolicyRunner
    metrics: MetricsLine
    timer: Timer
    _live: weakref.ref[Generator[Step, None, None]] | None = field(default=None, init=False)
    _feed: Feed | StreamFeed | None = field(default=None, init=False)
    source: Source | None = field(default=None, init=False)
    _batches: Batches | None = field(default=None, init=False)
    _coming: _Coming | None = field(default=None, init=False)  # as long as none of its steps was asked for
    _has_sizes: bool = field(default=False, init=False)  # loops of the script have batch sizes of their own
    _number: int = field(default=-1, init=False)
    _epochs: int = field(default=0, init=False)
    _joined: bool = field(default=False, init=False)  # in the middle of the loop that is under way

    def __post_init__(self) -> None:
        self.config, self.membership, self.trained = self.run.config, self.run.membership, self.run.trained
        self.listeners, self.ending, self.leave_request = self.run.listeners, self.run.ending, self.run.leave
        self.shards, self.cut_short, self.boundary = self.steps.shards, self.between.cut_short, self.between.reached
        self._contents = Contents()
        self._feeds = LoopFeeds(self.config.job.seed, self.config.settings.faults.timeout_s)

    def over(
        self, dataset: Any, epochs: int, asked: Asked, max_steps: int | None, batch_size: int | None, begin: int
    ) -> Generator[Step, None, None]:
        """The steps of a loop over a data set; see :meth:`Run.steps`."""
        require_counts(epochs, max_steps)
        self._forgo()
        if begin < 0:
            raise JobError(f"run.steps(begin={begin}): needs a number of steps, from 0 on")
        if self.steps.under_way is not None:
            raise JobError("run.steps inside of another run.steps: one loop at a time; end the first one before")
        feed = self._feeds.of(dataset, asked, self.trained.loops, epochs)
        samples, shards = self._batch_of(feed, batch_size), self.config.job.shards
        require_strategy(feed, str(self.steps.strategy), has_own_weights=self.steps.computer.has_own_weights)
        content = self._contents.of(dataset, feed, Glance(shards, samples))
        self.synchronisation.before_call()
        same = {**feed.same(), "batch size": samples, "begin": begin, CONTENT: content}
        self.collectives.agree("data set", same, feed.cure)
        batches = Batches(feed.order.cut, samples, shards)
        first = batches.of(0)
        require_steps(feed, first, samples)
        noted = "" if self.config.settings.checkpoints.allow_job_change else content
        reading = Reading(first.samples, feed.shuffle, feed.drop_last, feed.order.digest, noted)
        coming = self._coming = _Coming(partial(self._enter, batches, reading, feed, epochs, max_steps, begin))
        live = self._loop(coming)
        self._live = weakref.ref(live)  # a break lets go of the last one that holds it, and so ends the loop
        return live

    def _batch_of(self, feed: Feed | StreamFeed, batch_size: int | None) -> int:
        """The samples in a loop's global batches: its own number holds, unless another one is set from outside.

        Raises:
            JobError: nobody says it, it is below 1, the loader has another one, or policies go by that of the job.
        """
        config, by_script = self.config, self.config.asked_batch_size
        if batch_size is not None and batch_size < 1:
            raise JobError(f"run.steps(batch_size={batch_size}): needs a number of samples from 1 on")
        said = batch_size or (feed.batch_size if feed.is_batched else None) or by_script or feed.batch_size
        if said is None:
            raise JobError(
                "run.steps: nobody says how many samples a global batch has. Give it a DataLoader that does, "
                "run.steps(…, batch_size=…), or unisono.init(batch_size=…)"
            )
        self._has_sizes |= said != by_script
        found = said if config.batch_set_by is None else config.job.require_batch_size(config.batch_set_by)
        require_batches(feed, found, said)
        if said != by_script and not self.trained.policy_state.is_empty:
            raise JobError(
                f"run.steps(batch_size={batch_size}): policies go by the batch of the job, which has "
                f"{config.job.batch_size}. Say it in unisono.init, or leave the policies out"
            )
        return found

    def leave(self) -> None:
        """End a loop that was left, and whose steps somebody still holds. It may have loader processes."""
        self._forgo()
        live = None if self._live is None else self._live()
        if live is not None and getgeneratorstate(live) != GEN_RUNNING:
            live.close()

    def enter_next(self) -> LoopPlace:
        """Enter the loop that was made last, before its steps are asked for; see :meth:`Run.enter`."""
        if self._coming is None:
            raise JobError(
                "run.enter: there is no loop to enter. Call it between steps = run.steps(…) and its first step"
            )
        loop, progress = self._coming(), self.trained.progress
        if loop is None or loop.is_behind(progress):
            return LoopPlace(progress.position.step, progress.position.samples, is_over=True)
        self.move(loop.entered(progress))
        self.between.snapshots.settle()
        return loop.place(self.trained.progress, self)

    def shape(self) -> BatchShape:
        """Of the next global batch.

        Raises:
            PolicyError: a policy wants one that the data cannot have.
            JobError: the steps of a stream are no longer made together.
        """
        shape = self.trained.policy_state.shape
        if self._feed is not None and self._batches is not None:
            require_shape(self._feed, shape, BatchShape(self._batches.batch_size, self._batches.shards))
            require_strategy(self._feed, str(self.steps.strategy), has_own_weights=self.steps.computer.has_own_weights)
        return shape

    def steps_in(self, epoch: int) -> int:
        """The number of steps in an epoch of the loop that is under way, with the present batch size."""
        assert self._batches is not None, "a loop is under way"
        return replace(self._batches, batch_size=self.shape().samples).of(epoch).steps

    def place_of(self, step: Step) -> tuple[int, int, int]:
        """How many epochs the loop has, how many steps the one of a step, and how many of these come before it."""
        steps = self.steps_in(step.epoch)
        return self._epochs, steps, min(-(-step.batch.start // max(1, self.shape().samples)), max(0, steps - 1))

    def is_stopped(self) -> bool:
        """Whether a policy or a guest has stopped the loop."""
        return self.trained.policy_state.stopped == self._number

    def end_here(self) -> None:
        """The step under way is the loop's last one, and compared as such: a fault sets the run back, and this, too."""
        self.trained.policy_state.stopped = self._number

    def compare_next(self) -> None:
        """Have the state compared at the next boundary: all workers may leave the loop behind it."""
        self.between.requests.compare = True

    def is_whole(self) -> bool:
        """Whether what the step computed counts."""
        return not (self.steps.is_computing or self.ending.is_closed or self.trained.is_doubted)

    def move(self, progress: RunProgress) -> None:
        """The run stands here now."""
        self.trained.progress = progress

    def enter(self) -> None:
        """A loop begins. Whoever joins in the middle of it finds it compared."""
        if not self._joined:
            self.synchronisation.before_call()
            self.between.verification.require_right()

    def begin(self, step: Step) -> None:
        """A step's samples are loaded."""
        self.between.snapshots.settle()
        self.trained.go_on()  # all have agreed on the loop
        seed_generators(stream_seed(self.config.job.seed, Stream.SCRIPT, step.number))
        self.steps.step_begins(step)
        self.leave_request.hear_interrupts()
        self.listeners.tell(lambda one: one.step_begins(step))

    def compute(
        self,
        step: Step,
        loss_fn: LossFunction,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        clip: Clip,
        update: OwnUpdate | None,
    ) -> float:
        """Carry a call of ``step.run`` out."""
        self.ending.require_open()
        prepared = self.trained.prepared
        assert prepared is not None, "loops come after run.prepare"
        assert self.source is not None, "a step comes from a loop"
        if step is not self.steps.under_way:
            raise JobError("this step is over: call step.run in the body of the loop that it came from")
        if self.trained.is_doubted:  # the run goes back at the end of the body
            return self.metrics.newest_loss
        prepared.check_unchanged()
        self.trained.require_same_trained()
        self.steps.is_computing = True
        call = StepCall(step, loss_fn, _chosen(prepared, optimizer), clip, update, self.source)
        if (asked := self.config.recording.curvature) is not None:
            self._end_with_figures(call, asked)
        monitoring = self.config.execution.monitoring
        if monitoring.measures_curvature(step.number, step.calls):
            question = question_of({"start": self.trained.monitors.critical_step, **monitoring.curvature})
            step.curvature |= self.steps.computer.measure(call, question, self.collectives).figures
        done = self.steps.computer.compute(call, self.collectives)
        self.steps.is_computing = False
        step.metrics |= done.metrics
        step.is_skipped = done.is_skipped
        done = replace(done, figures={**done.figures, **step.curvature})
        if not self.trained.is_doubted:
            self.listeners.tell(lambda one: one.call_done(step, call.optimizers, done))
        return done.loss

    def _end_with_figures(self, call: StepCall, folder: Path) -> NoReturn:
        """Measure as ``unisono curvature`` asks in a folder, and end there, before any update."""
        asked = {**read_object(folder / ASKED), "critical": not sharing_in(call.optimizers)}
        found = self.steps.computer.measure(call, question_of(asked), self.collectives)
        if self.membership.is_main:
            (folder / FOUND).write_bytes(to_json({"samples": call.step.size, **asdict(found)}))
        self.collectives.together(lambda workers: workers.barrier())
        raise SystemExit(0)

    def measure(self, loss_fn: LossFunction, said: Mapping[str, Any]) -> Curvature:
        """Measure curvature on the batch of the step under way; see :meth:`Run.curvature`. Collective."""
        question = question_of(said)
        self.ending.require_open()
        step, prepared = self.steps.under_way, self.trained.prepared
        if step is None or prepared is None or self.source is None:
            raise JobError(
                "run.curvature measures on the batch of a step: call it in the body of a loop over run.steps"
            )
        if self.trained.is_doubted:
            return Curvature()
        prepared.check_unchanged()
        call = StepCall(step, loss_fn, prepared.optimizers, Clip(), None, self.source)
        found = self.steps.computer.measure(call, question, self.collectives)
        step.curvature |= found.figures
        return found

    def end(self, after: RunProgress | None) -> None:
        """The body of a step is done; or it was left, and nothing of the step counts (None)."""
        step, self.steps.under_way = self.steps.under_way, None
        if after is None or step is None or self.trained.is_doubted:
            return
        self.trained.progress = after
        count = self.collectives.step = after.position.step
        is_settled = self.synchronisation.step_ends(step)
        if self.policy_runner.links_are_due() or self.config.execution.monitoring.measures_links(count):
            self._measure_links()
        self.metrics.finish(step, self.policy_runner.rates)
        latest = self.metrics.latest
        if self.metrics.is_computed:
            self.timer.step_took(latest["seconds"], self.membership.workers.transport.traffic.take())
        shard_s = self.timer.shard_s if self.trained.policy_state.balances else 0.0
        self.membership.tell(self.collectives.progress, float(latest.get("samples_per_s", 0.0)), shard_s)
        self.listeners.tell(lambda one: one.step_ends(step, count))
        if is_settled:
            self.policy_runner.step_ends(step)
            self.steps.follow(self.collectives)

    def _enter(
        self,
        batches: Batches,
        reading: Reading,
        feed: Feed | StreamFeed,
        epochs: int,
        max_steps: int | None,
        begin: int,
    ) -> Loop | None:
        """Begin a loop, with the others; nothing if they have it behind them."""
        number = self._number = self.trained.loops
        self.trained.loops += 1
        self._epochs = epochs
        course, source = self._course(feed, batches)
        special = self.config.settings.special
        cuts = special.stop_after, special.stop_after_epochs
        loop = Loop(number, reading, course, epochs, *cuts, max_steps, begin)
        self._joined, self.source, self._feed, self._batches = self.membership.joins, source, feed, batches
        self.steps.is_computing = False
        self.listeners.tell(lambda one: one.loop_begins(number, batches, feed.order))
        if not self.collectives.enter(number):
            self._seed_behind(number)
            return None
        if self._has_sizes and not loop.is_behind(progress := self.trained.progress):
            is_under_way = loop.is_under_way(progress)
            self.trained.policy_state.begin_loop(batches.batch_size, is_under_way=is_under_way)
        self.policy_runner.begin()
        return loop

    def _loop(self, begun: Callable[[], Loop | None]) -> Generator[Step, None, None]:
        if (loop := begun()) is None:
            return
        self._coming = None
        try:
            yield from loop.steps(self.trained.progress, self)
        except GeneratorExit:  # a break; or the end of a run that is closed in the middle of the loop
            if self.is_whole():
                self._leave(loop)
            raise
        self._leave(loop)

    def _leave(self, loop: Loop) -> None:
        self.collectives.leave(loop.number)
        self._seed_behind(loop.number)

    def _forgo(self) -> None:
        """A loop that was entered, and none of whose steps was asked for, is left."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.loop is not None and self.is_whole():
            self.move(coming.loop.passed_by(self.trained.progress))
            self._leave(coming.loop)

    def _course(self, feed: Feed | StreamFeed, batches: Batches) -> tuple[Course, Source]:
        """The steps of a loop, and what gives their shards."""
        if isinstance(feed, StreamFeed):
            stream = feed.source(self.config.job.shards)
            return StreamCourse(stream, self.config.job.shards, self.collectives.together, feed.promised), stream
        load = partial(prefetch, feed.source, processes=feed.processes, device=self.config.device)
        return CutCourse(batches, load), feed.source

    def _seed_behind(self, loop: int) -> None:
        """Whoever has skipped the loop has to draw what the others draw."""
        seed_generators(stream_seed(self.config.job.seed, Stream.AFTER, loop))

    def _measure_links(self) -> None:
        self.synchronisation.before_call()
        measured = self.collectives.together(_measured_links)
        if measured is not None:
            self.trained.monitors.links = Links.from_json(measured)
            self.listeners.tell(lambda one: one.links_measured(measured))


class _Coming:
    """A loop that a script has made, and may enter before it asks for steps.

    Args:
        begin: a function that begins the loop; called once.
    """

    def __init__(self, begin: Callable[[], Loop | None]) -> None:
        self.loop: Loop | None = None
        self._begin: Callable[[], Loop | None] | None = begin

    def __call__(self) -> Loop | None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self.loop = begin()
        return self.loop


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
