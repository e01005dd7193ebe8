"""The run: the object with which a script trains."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, overload

from torch import nn

from unisono.arguments import require_types
from unisono.data.feed import Options, Shuffle
from unisono.data.generators import generators_kept
from unisono.data.shards import Collate
from unisono.errors import JobError, ModelError
from unisono.received import short
from unisono.train.group.workers import Operation, Workers
from unisono.train.loop.evaluation import Metrics, Predict
from unisono.train.model.prepared import Prepared, require_modules
from unisono.train.model.tensors import digest_tensors
from unisono.train.plugins import Callback, Event, checked
from unisono.train.preparation import prepare
from unisono.train.run_with_loop import RunWithLoop
from unisono.train.step.part import Part
from unisono.train.step.step import LossFunction, Step
from unisono.train.step_loop import LoopPlace

M = TypeVar("M")
O = TypeVar("O")  # noqa: E741
T = TypeVar("T")


class Run(RunWithLoop):
    """One training run, as one of its workers sees it. Made by :func:`unisono.init`."""

    def on(self, event: Event, callback: Callback) -> None:
        """Call ``callback(run, step)`` on this worker whenever an event happens in its loops.

        Args:
            event: ``step_begins``: the step's samples are loaded, and nothing of it is computed. ``step_computed``:
                this worker has computed its shards (in ``step.computed_s`` seconds) and has yet to add those of the
                others; once per call of ``step.run``, and again if the call is repeated after a loss. ``step_ends``:
                the step is committed, and the loop's body is done.
            callback: a function that is called on the main thread, in the order of the calls of ``on``. It must leave
                the weights alone and draw no random numbers, or the bits of the result change. What it raises is raised
                in the loop.

        Raises:
            JobError: there is no such event; lists those that exist.
        """
        self.inside.callbacks.add(event, callback, self)

    # -- what is trained -------------------------------------------------------------------------------------

    @overload
    def prepare(self, model: M, optimizer: O, *, state: Mapping[str, Any] | None = None) -> tuple[M, O]: ...

    @overload
    def prepare(self, model: M, optimizer: O, *more: Any, state: Mapping[str, Any] | None = None) -> Any: ...

    def prepare(self, model: Any, optimizer: Any, *more: Any, state: Mapping[str, Any] | None = None) -> Any:
        """Give every worker the same weights, and get ready to train them.

        Args:
            model: a module, or a list of them; moved to ``run.device``.
            optimizer: an optimizer, or a list of them, over the model's parameters.
            more: data loaders and schedulers of a loop that the script keeps; see :meth:`epochs` and :meth:`backward`.
            state: further tensors that loss functions change, by name: a tensor, ``(tensor, rule)``, or ``(object,
                {attribute: rule})``. Rules that combine them: ``mean first last sum max min cat``.

        Returns:
            the same objects, and what stands for the loaders. A run that resumes has its weights in them.

        Raises:
            ModelError: nothing to train, or state that cannot be combined.
            JobMismatch: the workers hold different models; names the first difference.
            CheckpointError: the run folder's checkpoint holds another model.
            JobError: something else is among them.
        """
        prepare(self.inside, model, optimizer, state)
        return model, optimizer, *map(self._prepare_one, more)

    def register(self, name: str, thing: Any) -> Any:
        """Make an object part of every checkpoint, and return it: a scheduler, a counter, an average of the weights.

        Args:
            name: the name under which checkpoints keep the object's state.
            thing: an object with ``state_dict()`` and ``load_state_dict(state)``.

        Raises:
            JobError: the name is taken, or the object lacks one of the two methods.
        """
        self.inside.trained.registry.add(name, thing)
        return thing

    def ignore(self, *paths: str) -> None:
        """Have no warning of state beside the model that decides nothing: ``run.ignore("model.cache")``."""
        self.inside.states.ignore(*paths)

    def add_part(self, part: Part) -> None:
        """Add a :class:`unisono.Part` of your own to each step, on all workers. Call it before ``run.prepare``."""
        self.inside.exact.add(checked(part))

    def steps(
        self,
        dataset: Any,
        epochs: int = 1,
        *,
        shuffle: Shuffle | None = None,
        drop_last: bool | None = None,
        loader_workers: int | None = None,
        collate_fn: Collate | None = None,
        max_steps: int | None = None,
        batch_size: int | None = None,
        begin: int = 0,
    ) -> Generator[Step, None, None]:
        """Yield the steps of a training loop, one per global batch.

        A run that resumes yields only the steps that are left. Samples are distributed among workers by index, before
        they are loaded. After a fault of memory that cannot be healed, the run goes back to the newest state that is
        known to be right, and the steps after it come again.

        Args:
            dataset: a map-style data set with a length, or a ``DataLoader``, which decides all but the number of
                epochs.
            epochs: passes over it.
            shuffle: whether to shuffle each epoch, in an order that follows from seed and epoch; by default it does.
                With a :class:`BlockShuffle`, or ``"blocks"`` for a data set that has a ``block_size``, by blocks.
            drop_last: whether to leave out a last, smaller batch instead of weighting it by its size (the default).
            loader_workers: the number of this worker's processes that load ahead, over all epochs; 0 (the default)
                loads in this process, while no step is computed. It decides no bit.
            collate_fn: a function that makes a batch of a list of samples; torch's ``default_collate`` by default.
            max_steps: the number of steps of the whole job with which the loop is over, unless its epochs end before.
            batch_size: the number of samples in this loop's global batches; by default the job's.
            begin: the number of this loop's first steps that are done already, by a framework's own checkpoint that the
                script has loaded. They count as steps of the job. A run that resumes by itself knows its place.

        Raises:
            DataError: the data set or the loader cannot be read by index, a batch cannot be collated, or a loader
                process failed, died or gave nothing for as long as ``faults.timeout_s``.
            JobError: ``loader_workers`` is no number of processes, a loader's ``batch_size`` is not the loop's, or
                ``batch_size`` is not the job's although policies are based on that.
            JobMismatch: the data set differs between workers, or from the one that a checkpoint was reading.
            SystemExit: with code 75, after a checkpoint, when a worker was asked to leave.
        """
        arguments = locals()
        self._prepared()
        require_types(Run.steps, arguments)
        options = Options(shuffle, drop_last, loader_workers, collate_fn=collate_fn)
        return self.inside.loop.over(dataset, epochs, options, max_steps, batch_size, begin)

    def curvature(self, loss_fn: LossFunction, **question: Any) -> Any:
        """Measure the curvature of the mean loss over the present step's batch, in a loop's body. It changes nothing.

        Args:
            loss_fn: the loss function, as for ``step.run``.
            question: what to measure, see :class:`~unisono.adapt.norms.CurvatureQuestion`.

        Returns:
            the figures, a :class:`~unisono_lab.second_order.curvature_probe.Curvature`.

        Raises:
            JobError: no step is under way, a setting is wrong, or workers have no whole weights.
            LossError: the loss is not finite, or the loss function goes backward by itself.
            ModelError: an operation of the model has no second derivative.
        """
        self._require_no_body("run.curvature")
        return self.inside.loop.body.curvature.measure(loss_fn, question, self.inside.loop.body.source)

    def enter(self) -> LoopPlace:
        """Enter the loop that :meth:`steps` has made, before its first step: for a loop that a framework controls.

        A run that resumes has then restored everything that it kept, also registered objects and optimizers. A worker
        that joins waits here until the others take it in, and then has their state. Make and register everything
        before this call, and make no collective call between it and the first step.

        Returns:
            the place from which the loop goes on: step, epoch, batch of the epoch, and whether nothing is left.

        Raises:
            JobError: there is no loop that was made and not begun.
        """
        self._prepared()
        return self.inside.loop.enter_next()

    # -- beside training -------------------------------------------------------------------------------------

    def evaluate(
        self, dataset: Any, metrics: Metrics, *, batch_size: int | None = None, collate_fn: Collate | None = None
    ) -> dict[str, float]:
        """Return means over a whole data set, distributed among the workers: the same bits on any number of them.

        Meanwhile the model is in evaluation mode, and no gradients are computed.

        Args:
            dataset: a map-style data set with a length, a stream, or a ``DataLoader``, which decides the last two
                arguments.
            metrics: ``metrics(model, batch) -> {name: mean}``, or a dict of functions that each return a mean; a
                mean that is not over samples is returned as ``unisono.Weighted(mean, weight)``.
            batch_size: the samples per call; by default as many as a training shard has.
            collate_fn: a function that makes a batch of a list of samples, as in :meth:`steps`.

        Returns:
            the mean of each metric over all samples, weighted by the batches' sizes or weights.
        """
        self._prepared()
        self.inside.synchronisation.before_call()
        return self.inside.evaluator.carry_out(
            lambda evaluation: evaluation.means(metrics), dataset, batch_size, collate_fn
        )

    def predict(
        self,
        dataset: Any,
        predict_fn: Predict | None = None,
        *,
        batch_size: int | None = None,
        collate_fn: Collate | None = None,
    ) -> Any:
        """Return the model's outputs for a whole data set, in its order (or the loader's), on every worker.

        Args:
            dataset: the data set, as for :meth:`evaluate`; the samples of a stream's readers come in turn.
            predict_fn: ``predict_fn(model, batch)`` returns a tensor, or lists or dicts of tensors, with one row per
                sample; by default the model is called with the batch, or with its first part if it has several.
            batch_size: the samples per call; by default as many as a training shard has.
            collate_fn: a function that makes a batch of a list of samples, as in :meth:`steps`.

        Returns:
            what ``predict_fn`` returns, with one row per sample of the data set, or of the loader's batches.
        """
        self._prepared()
        self.inside.synchronisation.before_call()
        return self.inside.evaluator.carry_out(
            lambda evaluation: evaluation.outputs(predict_fn), dataset, batch_size, collate_fn
        )

    def all_reduce(self, value: Any, operation: Operation = "mean") -> Any:
        """Combine one number or tensor per worker: ``mean``, ``sum``, ``max`` or ``min``."""
        self.inside.synchronisation.before_call()
        return self.inside.collectives.together(lambda workers: workers.all_reduce(value, operation))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of the worker ``source``: a tensor, a number, text, or lists and dicts of them."""
        self.inside.synchronisation.before_call()
        return self.inside.collectives.together(lambda workers: workers.broadcast(value, source))

    def together(self, function: Callable[[Workers], T]) -> T:
        """Carry out a function that all workers call together, such as an evaluation of which each does a part.

        Args:
            function: a function of the workers: their ``rank``, ``world_size``, ``all_reduce``, ``broadcast`` and
                ``gather_json``. It changes no weights, and returns the same on every worker: numbers, text, tensors,
                and lists and dicts of them. It is called again if a worker is lost during it; then draws of the global
                random generators are taken back.
        """
        require_types(Run.together, {"function": function})
        self.inside.synchronisation.before_call()
        return self.inside.collectives.together(generators_kept()(function))

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self.inside.synchronisation.before_call()
        self.inside.collectives.together(lambda workers: workers.barrier())

    def checkpoint(self) -> None:
        """Write a checkpoint: at the end of the loop's body if a step is under way, else now.

        Every worker calls it. The checkpoint is written when all of them hold the same state.
        """
        self.inside.checkpoints.requested = True
        if self.inside.steps.under_way is None:
            self.inside.synchronisation.before_call()
            self.inside.snapshots.save_if_due(self.inside.verification.require_right())

    def resize(self, workers: int) -> None:
        """Ask for another number of workers, from one of the next steps on; no more than there is room for.

        Every worker calls it when it reaches the call. The job goes on meanwhile.

        Args:
            workers: the number of workers, at least 1.

        Raises:
            JobError: the workers of this job stay the same, or the number is below 1; says what to do.
        """
        self.inside.ending.require_open()
        if not isinstance(workers, int) or workers < 1:  # type: ignore[redundant-expr]  # scripts may be unchecked
            raise JobError(f"run.resize({short(workers)}): needs a whole number of workers, at least 1")
        if not self.inside.membership.joins:  # the others have asked before
            self.inside.membership.resize(workers)

    def finish(self, model: nn.Module | Sequence[nn.Module] | None = None) -> str:
        """End the run: write ``result.json``, and print the weights' digest on the main worker.

        Args:
            model: the module, or a list of them, to digest; by default everything that was prepared. Parameters that
                only optimizers hold are included, unless nothing of the given modules was prepared.

        Returns:
            the sha256 of the weights, in hex.

        Raises:
            JobMismatch: the workers' weights differ, which must not happen.
        """
        prepared, inside = self._prepared(), self.inside
        require_modules(model)
        inside.loop.finish()
        if inside.membership.joins:
            inside.collectives.await_end()
        inside.synchronisation.before_call()
        inside.verification.require_kept(self.rank)
        inside.policy_runner.end()
        inside.snapshots.settle(is_end=True)
        verified = inside.verification.require_right()
        weights = digest_tensors(prepared.tensors(model))
        inside.collectives.agree("set of weights", {"sha256": weights})
        # Any worker may read this afterwards. If the main worker is lost while it writes, the next one writes it.
        save = partial(inside.snapshots.save_last, verified)
        inside.collectives.together(partial(inside.results.conclude, weights, save))
        inside.membership.finished(weights)
        self.print(f"weights sha256 {weights}")
        inside.ending.finish()
        return weights

    def close(self) -> None:
        """Close connections and files, and restore torch's settings. ``finish`` calls it. Not collective."""
        self.inside.ending.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepared(self) -> Prepared:
        self.inside.ending.require_open()
        if self.inside.trained.prepared is None:
            raise ModelError("call model, optimizer = run.prepare(model, optimizer) first")
        return self.inside.trained.prepared
