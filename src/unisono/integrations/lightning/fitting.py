"""One ``fit``: it enters the run's loop where the others are, and gives Lightning the steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from unisono.errors import JobError
from unisono.integrations.lightning.batch import GlobalBatch, let_pass
from unisono.integrations.lightning.fit_state import FitState
from unisono.integrations.lightning.framework import part
from unisono.integrations.lightning.loader import TrainingLoader, limited
from unisono.integrations.lightning.metrics import Metrics
from unisono.integrations.lightning.training import Training
from unisono.integrations.names import free_name
from unisono.train.run import Run
from unisono.train.state.registered import kept
from unisono.train.step.step import Step

_Leaves = part("utilities.exceptions")._TunerExitException
_FitLoop: Any = part("loops.fit_loop")._FitLoop

ENDLESS = 2**31 - 1
"""Epochs of a training that something else than their number ends."""


class ComparedAtEnd(_FitLoop):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Lightning's loop over epochs, which ends when workers have compared its last step.

    Attributes:
        fit: the training.
    """

    fit: OneFit

    @property
    def done(self) -> bool:
        """Whether it is over, and right."""
        return bool(super().done) and self.fit.is_right()


class OneFit:
    """Gives Lightning's loops the steps of the run, and has them stand where the run does.

    Args:
        run: the run.
        trainer: the trainer, whose loader is set up.

    Attributes:
        training: what computes the steps.
        is_over: whether the training has come to its end.
    """

    def __init__(self, run: Run, trainer: Any) -> None:
        self.training = Training(run, trainer, Metrics(trainer.lightning_module))
        self.is_over = False
        self._run, self._trainer = run, trainer
        self._state = FitState(self.training)
        self._steps: Generator[Step, None, None] | None = None
        self._again: Mapping[str, Any] | None = None
        self._has_begun = False
        self._ahead: Step | None = None  # that the run has gone back to from the training's end
        self._let_go: Callable[[], None] = lambda: None

    @property
    def may_ask(self) -> bool:
        """Whether a collective call can be made: not between the loop's entrance and its first step."""
        return self._has_begun

    def prepare(self) -> None:
        """Give all workers the same weights."""
        module, trainer = self._trainer.lightning_module, self._trainer
        self._let_go = let_pass(module)
        # One way out: the run leaves at the end of a step, with a checkpoint.
        trainer._signal_connector.teardown()
        self._run.prepare(module, trainer.optimizers, state=self.training.metrics.shared_state())

    def enter(self, loader: TrainingLoader) -> bool:
        """Enter the loop where the others are.

        Returns:
            whether something is left of it.
        """
        epochs, read = self._trainer.max_epochs, limited(loader.loader, self._trainer.fit_loop.max_batches)
        over = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._steps = self._run.steps(
            read,
            ENDLESS if epochs in (None, -1) else epochs,
            batch_size=getattr(read.batch_sampler, "batch_size", None),
            begin=over if self._trainer.ckpt_path is not None else 0,
        )
        place = self._run.enter()
        self.is_over = place.is_over
        loop = self._trainer.fit_loop
        loop.__class__, loop.fit = ComparedAtEnd, self
        if self._again is not None:  # it was restored: Lightning is to skip what begins an epoch
            self._trainer.fit_loop._restarting = True
        return not place.is_over

    def next_step(self) -> GlobalBatch:
        """Go on to the next step."""
        assert self._steps is not None, "the loop was entered"
        if (again := self._again) is not None:
            self._again = None
            self._state.load(again)  # what Lightning has set back on its way here
        for rows in self._trainer.strategy.rows:
            rows.begin()
        self._has_begun = True
        if self.training.step is not None and not self.training.step.calls:
            raise JobError(
                "on_train_batch_start returned -1, which leaves the rest of an epoch out: the run's epochs are as long "
                "as the loader's. Say limit_train_batches, or give the trainer a shorter loader"
            )
        try:
            step = self.training.step = self._ahead or next(self._steps)
            self._ahead = None
        except StopIteration:
            self.end()
            raise _Leaves from None
        return GlobalBatch.of(step.size)

    def is_right(self) -> bool:
        """Lightning has come to the end. Collective.

        Returns:
            whether the training is over; if not, a fault of a memory has set the run back into it.
        """
        loop = self._trainer.fit_loop
        if self._steps is None or self.training.step is None:
            return True
        self._run.inside.loop.end_here()
        self._has_begun = False
        self._ahead = next(self._steps, None)
        if self._ahead is None:
            self._has_begun = True
            return True
        loop._restarting = True  # as for a worker that joins
        loop.reset()
        return False

    def end(self) -> None:
        """The training is over. A worker that has skipped it hears how it ended: scripts ask callbacks for that."""
        self.is_over = True
        if self._steps is not None:
            self._steps.close()
        has_skipped = self._run.inside.membership.joins
        known = self._run.together(lambda workers: workers.broadcast(self.state() if workers.rank == 0 else None))
        if has_skipped:
            self._state.load(known)

    def close(self) -> None:
        """Give the module back as it was. A loop that an error has left is over: a script may catch it, and go on."""
        if self._steps is not None:
            self._steps.close()
        self._let_go()

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        return self._state.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Stand there."""
        self._state.load(state)
        if not self._has_begun:
            self._again = state


class Fits:
    """The trainings of a script, one after the other, as checkpoints and other workers get them.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._name = ""
        self._begun: list[OneFit] = []
        self._awaited: dict[int, Mapping[str, Any]] = {}

    def begin(self, trainer: Any) -> OneFit:
        """One more begins, or was over where the run goes on.

        Raises:
            JobError: there is no loader that the run can read.
        """
        loader = _loader_of(trainer)
        fit = OneFit(self._run, trainer)
        if loader is None:
            fit.is_over = True
            return fit
        fit.prepare()
        if not self._name:
            self._name = free_name(self._run, "lightning")
            self._run.register(self._name, self)
        number = len(self._begun)
        self._begun.append(fit)
        if (state := self._awaited.pop(number, None)) is not None:
            fit.load(state)
        if not fit.enter(loader):
            self._recall(number)
            fit.end()
        return fit

    def _recall(self, number: int) -> None:
        """A training was over when the run was where it goes on: have its callbacks know what they knew."""
        restored = self._run.inside.trained.restored
        if restored is not None:
            fits = kept(restored, "registered")[self._name]["fits"]
            if number < len(fits):
                self._begun[number].load(fits[number])

    def state_dict(self) -> dict[str, Any]:
        """All of them."""
        return {"fits": [one.state() for one in self._begun]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of them; what is of one that this worker has yet to begin waits for that."""
        for number, one in enumerate(state["fits"]):
            if number < len(self._begun):
                self._begun[number].load(one)
            else:
                self._awaited[number] = one


def _loader_of(trainer: Any) -> TrainingLoader | None:
    """The loader that the trainer reads; None if there is nothing to train."""
    loop = trainer.fit_loop
    loop.setup_data()
    if loop.skip:
        return None
    combined = loop._combined_loader
    if len(combined.flattened) != 1 or combined.iterables is not combined.flattened[0]:
        raise JobError(
            f"the trainer reads {len(combined.flattened)} training loaders in a collection: give it one loader, over a "
            f"data set that returns all of a sample (torch.utils.data.StackDataset puts several together)"
        )
    found: TrainingLoader = combined.flattened[0]
    return found
