"""A call of ``fit``: it enters the run's loop at the others' place, gives Lightning the steps, and has a state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from math import inf
from typing import Any

from unisono.data.generators import generators_kept
from unisono.integrations.kept import Trainings
from unisono.integrations.lightning.clock import decide_by_main_clock
from unisono.integrations.lightning.fit_state import load_state, state_of
from unisono.integrations.lightning.framework import Leaves, part
from unisono.integrations.lightning.joined_loaders import CombinedLoader, joined
from unisono.integrations.lightning.loops import GlobalBatch, TrainingLoader, let_pass, limited, own_loaders
from unisono.integrations.lightning.manual import ManualLoop, ManualSteps
from unisono.integrations.lightning.metrics import Metrics
from unisono.integrations.lightning.pruning import Pruning
from unisono.integrations.lightning.training import Training
from unisono.integrations.lightning.whole_batches import LoaderBatches, StepFetcher, is_indexed, whole_of
from unisono.integrations.shard_state import ShardState
from unisono.train.model.prepared import Prepared
from unisono.train.run import Run
from unisono.train.step.step import Step

_FitLoop: Any = part("loops.fit_loop")._FitLoop
_AutomaticOptimization: Any = part("loops.optimization.automatic")._AutomaticOptimization
_PrefetchDataFetcher: Any = part("loops.fetchers")._PrefetchDataFetcher

ENDLESS = 2**31 - 1
"""Epochs of a training that something else than their number ends."""


class ComparedAtEnd(_FitLoop):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Lightning's loop over epochs, which ends when workers have compared its last step."""

    fit: LightningFit

    @property
    def done(self) -> bool:
        """Whether it is over, and right."""
        return bool(super().done) and self.fit.is_right()


class Accumulating(_AutomaticOptimization):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Lightning's loop of one batch: a module's ``optimizer_step`` is called for updates, and not for other batches."""

    def _optimizer_step(self, batch_idx: int, closure: Any) -> None:
        if self.trainer.fit_loop._should_accumulate():
            self.trainer.strategy.accumulate(closure)
        else:
            super()._optimizer_step(batch_idx, closure)


class LightningFit:
    """Gives Lightning's loops the steps of the run, and has them stand where the run does.

    Args:
        trainer: the trainer, whose loader is set up.

    Attributes:
        may_ask: whether a collective call can be made: not between the loop's entrance and its first step.
    """

    def __init__(self, run: Run, trainer: Any) -> None:
        module = trainer.lightning_module
        self._pruning = Pruning(trainer, self._take_stock)
        kept = ShardState(run, module, "model")
        self.training = Training(run, trainer, Metrics(module), kept, self._pruning)
        if not module.automatic_optimization:
            self.training.manual = ManualSteps(self.training)
        self.is_over = False
        self._run, self._trainer = run, trainer
        self._steps: Generator[Step, None, None] | None = None
        self._again: Mapping[str, Any] | None = None
        self.may_ask = False
        self._ahead: Step | None = None  # that the run has gone back to from the training's end
        self._has_rest = False  # of its last epoch, whose steps a checkpoint of Lightning's has behind it
        self._let_go: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Give all workers the same weights."""
        module, trainer = self._trainer.lightning_module, self._trainer
        self._let_go = let_pass(module)
        # One way out: the run leaves at the end of a step, with a checkpoint.
        trainer._signal_connector.teardown()
        self._run.prepare(module, trainer.optimizers, state=self._shared)

    @property
    def _shared(self) -> dict[str, Any]:
        return self.training.metrics.shared_state() | self.training.kept.shared_state()

    def _take_stock(self) -> None:
        """Know the model as it is now: workers may be lost before all of them have agreed on it."""
        trained, trainer = self._run.inside.trained, self._trainer
        trained.prepared = Prepared.of(trainer.lightning_module, trainer.optimizers, self._shared)

    def enter(self, loader: TrainingLoader) -> bool:
        """Enter the loop where the others are. Return whether something is left of it."""
        epochs, most = self._trainer.max_epochs, self._trainer.fit_loop.max_batches
        read: Any = loader.loader
        if not is_indexed(read):
            read = LoaderBatches(read, self._run.job.seed, None if most == inf else most)
        else:
            read = limited(read, most)
        inside = self._run.inside
        is_first = inside.trained.restored is None and not inside.membership.joins
        over = 0 if self._trainer.ckpt_path is None else _steps_over(self._trainer.fit_loop)
        self._steps = self._run.steps(
            read,
            ENDLESS if epochs in (None, -1) else epochs,
            batch_size=getattr(getattr(read, "batch_sampler", None), "batch_size", None),
            begin=over,
        )
        place = self._run.enter()
        self._has_rest = place.is_over and is_first and over > 0
        self.is_over = place.is_over and not self._has_rest
        loop = self._trainer.fit_loop
        loop.__class__, loop.fit = ComparedAtEnd, self
        loop.epoch_loop.automatic_optimization.__class__ = Accumulating
        loop.epoch_loop.manual_optimization.__class__ = ManualLoop
        loop.epoch_loop.manual_optimization.steps = self.training.manual
        decide_by_main_clock(self._trainer)
        if self._again is not None:  # it was restored: Lightning is to skip what begins an epoch
            self._trainer.fit_loop._restarting = True
        return not self.is_over

    def next_step(self, loader: TrainingLoader) -> GlobalBatch:
        """Go on to the next step."""
        assert self._steps is not None, "the loop was entered"
        if (again := self._again) is not None:
            self._again = None
            load_state(self.training, again)  # what Lightning has set back on its way here
        for rows in self._trainer.strategy.rows:
            rows.begin()
        self.may_ask = True
        if (before := self.training.step) is not None and not before.calls:  # on_train_batch_start has returned -1
            self.training.left_out = before.epoch
        try:
            step = self._ahead or next(self._steps)
            self._ahead = None
            while step.epoch == self.training.left_out:
                step = next(self._steps)
            self.training.step = step
        except StopIteration:
            self.end()
            raise Leaves from None
        loader.has_ended = step.is_last_in_epoch and not is_indexed(loader.loader)
        batch = self.training.batch = GlobalBatch.of(step.size, partial(self._whole, step))
        return batch

    def _whole(self, step: Step) -> Any:
        """The global batch of a step, as the hooks for batches make it."""
        with generators_kept():
            return self._trainer.strategy.shard_to_device(whole_of(self._run.inside.loop.body.source, step.batch))

    def is_right(self) -> bool:
        """Lightning has come to the end. Collective.

        Return whether the training is over; if not, a fault of a memory has set the run back into it.
        """
        loop = self._trainer.fit_loop
        if self._steps is None or (self.training.step is None and not self._has_rest):
            return True
        self._run.inside.loop.end_here()
        self.may_ask = False
        self._ahead = next(self._steps, None)
        if self._ahead is None:
            self.has_left()
            self.may_ask = True
            return True
        loop._restarting = True  # as for a worker that joins
        loop.reset()
        return False

    def has_left(self) -> None:
        """The loop is over on this worker. Before one changes the model, it is over on all of them."""
        if self._pruning.is_permanent:
            self._run.barrier()

    def end(self) -> None:
        """End the training. A worker that has skipped it gets its final state: scripts ask callbacks for that."""
        self.is_over = True
        if self._steps is not None:
            self._steps.close()
        has_skipped = self._run.inside.membership.joins
        known = self._run.together(lambda workers: workers.broadcast(self.state() if workers.rank == 0 else None))
        if has_skipped:
            load_state(self.training, known)

    def leave(self) -> None:
        """Have the run know the model that the training leaves."""
        if self._pruning.is_permanent:
            self._pruning.end()
            self._run.prepare(self._trainer.lightning_module, self._trainer.optimizers, state=self._shared)
            self._run.inside.snapshots.settle()

    def close(self) -> None:
        """Give the module back as it was. A loop that an error has left is over: a script may catch it, and go on."""
        if self._steps is not None:
            self._steps.close()
        self._let_go()
        self._pruning.close()

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        return state_of(self.training)

    def load(self, state: Mapping[str, Any]) -> None:
        """Stand there."""
        load_state(self.training, state)
        if not self.may_ask:
            self._again = state

    go_on = load


class Fits(Trainings):
    """The trainings of a script with Lightning."""

    def begin(self, trainer: Any) -> LightningFit | None:
        """Begin the next fit, which may be over where the run goes on; None if there is nothing to train.

        Raises:
            JobError: there is no loader that the run can read.
        """
        loader = _loader_of(trainer)
        if loader is None:
            return None
        fit = LightningFit(self.run, trainer)
        fit.prepare()
        self.register("lightning", self)
        self.add(fit)
        if not fit.enter(loader):
            self.recall()
            fit.has_left()
            fit.end()
            fit.leave()
        return fit

    def state_dict(self) -> dict[str, Any]:
        """The states of all."""
        return {"fits": self.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of them."""
        self.load(state["fits"])


def _steps_over(loop: Any) -> int:
    """The steps that a checkpoint of Lightning's has behind it, with those that its epochs have left out."""
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.current
    if loop.max_batches == inf or batches.total.ready >= epochs.processed * loop.max_batches:
        return int(batches.total.ready)
    return int(epochs.processed * loop.max_batches + (batches.current.ready if epochs.ready > epochs.processed else 0))


def _loader_of(trainer: Any) -> TrainingLoader | None:
    """The loader that the trainer reads; None if there is nothing to train."""
    loop = trainer.fit_loop
    loop.setup_data()
    if loop.skip:
        return None
    combined = loop._combined_loader
    own = own_loaders(combined)
    if type(loop._data_fetcher) is _PrefetchDataFetcher:
        loop._data_fetcher = StepFetcher()
        loop._data_fetcher.setup(combined)
        iter(loop._data_fetcher)
    if len(combined.flattened) != 1 or combined.iterables is not combined.flattened[0]:
        step = combined.flattened[0].next_step
        combined = loop._combined_loader = CombinedLoader(TrainingLoader(joined(combined), step), "min_size")
        iter(combined)  # before it has a length
        loop._data_fetcher.setup(combined)
        iter(loop._data_fetcher)
    loader: TrainingLoader = combined.flattened[0]
    combined._iterables = own
    return loader
