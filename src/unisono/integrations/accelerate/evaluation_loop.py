"""A script's own evaluation loop: its batches are distributed, and the gathered results joined in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from unisono.data.feed import Feed, Options
from unisono.data.generators import Generators, seed_generators
from unisono.data.sample_order import LoopKey
from unisono.data.shards import ShardsRequest
from unisono.errors import DataError, JobError, ModelError
from unisono.integrations.kit import refused
from unisono.plan.order import Stream, stream_seed
from unisono.received import value_of
from unisono.train.group.workers import Workers
from unisono.train.loop.blocks import EVALUATION_EPOCH, NO_LOOP
from unisono.train.loop.prefetch import to_device
from unisono.train.run import Run

_OFTEN = 2

_SPARE = -1
"""Stands for the number of a batch that another worker has, too."""


class Evaluations:
    """The evaluation loops that a script is in: none, one, or one in the body of another or beside it."""

    def __init__(self, run: Run) -> None:
        self._run, self._open, self._is_cut_short = run, list[EvaluationLoop](), False

    @property
    def newest(self) -> EvaluationLoop | None:
        """The one that began last; None outside of them."""
        return self._open[-1] if self._open else None

    def of(
        self, loader: DataLoader[Any], in_training_mode: Sequence[nn.Module], *, has_optimizer: bool
    ) -> EvaluationLoop:
        """A pass over a loader, which begins with its first batch.

        ``in_training_mode`` are the models that are: what their layers count of batches must not depend on the workers.
        """
        kind = StreamEvaluation if isinstance(loader.dataset, IterableDataset) else EvaluationLoop
        loop = kind(self._run, loader)
        loop.is_whole = bool(in_training_mode)
        if not has_optimizer:
            loop.weights = Weights(in_training_mode)
        return loop

    def read(self, loop: EvaluationLoop) -> Iterator[Any]:
        """Yield the batches of a pass.

        Raises:
            ModelError: the script trains models in it.
        """
        self._open.append(loop)
        try:
            for batch in loop.batches():
                yield batch
                loop.weights.require_same()
                for other in self._begun_after(loop):
                    other.stay_beside()
        finally:
            if loop in self._open:
                self._open.remove(loop)
            self._is_cut_short |= loop.is_cut_short

    def forget(self) -> None:
        """Forget iterators that the script keeps: a training loop begins."""
        self._open.clear()

    def _begun_after(self, loop: EvaluationLoop) -> list[EvaluationLoop]:
        return self._open[self._open.index(loop) + 1 :] if loop in self._open else []

    def require_whole(self) -> None:
        """Refuse a loop that would leave something that depends on the number of workers.

        Raises:
            JobError: a loop that is distributed was left before its end.
        """
        if self._is_cut_short:
            raise JobError(refused("accelerate.evaluation-cut-short"))


class Weights:
    """Finds models that a script trains by itself, with an optimizer that is not prepared."""

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        self._before = [_written(parameter) for parameter in self._parameters]

    def require_same(self) -> None:
        """Refuse a loop in which weights have changed, or gradients have come.

        Raises:
            ModelError: they have.
        """
        for parameter, (version, gradient) in zip(self._parameters, self._before, strict=True):
            present = _written(parameter)
            if present[0] != version or present[1] not in (None, gradient):
                raise ModelError(refused("accelerate.no-optimizer"))


def _written(parameter: nn.Parameter) -> tuple[int, tuple[int, int] | None]:
    """How often a parameter was written; and its gradient, and how often that was."""
    gradient = parameter.grad
    return parameter._version, None if gradient is None else (id(gradient), gradient._version)


class EvaluationLoop:
    """A pass of a script over a loader with which it evaluates.

    The first batch comes to every worker. If the loop's body gathers once in it, the other batches are distributed: in
    each round every worker has one. If it gathers never, or several times, every worker has all batches: what the
    script adds up by itself is then that of all samples.

    A worker that is lost takes its batch of the round along. What is gathered then ends before that batch, which comes
    again in the next round; if it is the first one, no sample is gathered.

    Attributes:
        is_whole: whether every worker has all batches in any case.
        weights: the weights that must not change.
    """

    is_whole = False
    weights = Weights()

    def __init__(self, run: Run, loader: DataLoader[Any]) -> None:
        self._run, self._loader = run, loader
        inside, seed = run.inside, run.job.seed
        self._feed = Feed.of(loader, Options(), LoopKey(seed, NO_LOOP), inside.loop.config.settings.faults.timeout_s)
        self._cut = self._feed.order.cut(EVALUATION_EPOCH, self._feed.batch_size or 1)
        self._next, self._own = 0, 0  # the first batch that nobody has gathered, and this worker's
        self._first = 0  # that of the round
        self._gathered, self._is_shared = 0, False

    @property
    def is_cut_short(self) -> bool:
        """Whether batches that are distributed are left."""
        return self._is_shared and self._next < self._cut.steps

    @property
    def is_at_end(self) -> bool:
        """Whether the present batch, or round, is the last one."""
        return self._first + (self._run.world_size if self._is_shared else 1) >= self._cut.steps

    def stay_beside(self) -> None:
        """Distribute no batches: another loop goes on while the script is in this one, as with ``zip``.

        Raises:
            JobError: they are already.
        """
        if self._is_shared:
            raise JobError(refused("accelerate.evaluations-beside"))
        self._gathered = _OFTEN

    def batches(self) -> Iterator[Any]:
        """This worker's batches.

        Raises:
            JobError: the body gathered in its first turn, and not in this one; or other workers read other data.
        """
        inside = self._run.inside
        inside.synchronisation.before_call()
        inside.evaluator.agree(self._loader, self._feed, self._feed.batch_size or 1)
        before = Generators.capture()
        while self._next < self._cut.steps:
            place = max(self._run.rank, 0) if self._is_shared else 0
            self._first, self._own, self._gathered = self._next, self._next + place, 0
            yield self._batch(min(self._own, self._cut.steps - 1))
            if self._is_shared and self._gathered != 1:
                raise JobError(refused("accelerate.gathered-unevenly", times=self._gathered))
            if not self._is_shared:
                self._is_shared = self._next == 0 and self._gathered == 1 and not self.is_whole
                self._next += 1
        before.restore()  # a loop that is left leaves what it drew: the script may keep its iterator for long

    def gather(self, leaves: Sequence[Any]) -> list[Any]:
        """Gather the workers' results of a round, in the order of batches.

        ``leaves`` are this worker's tensors, of shape (samples, …), or lists.

        Raises:
            DataError: tensors cannot be put together.
        """
        self._gathered += 1
        if not self._is_shared:
            return self._shared(leaves)
        own = [_plain(leaf) for leaf in leaves]
        if self._gathered > 1:
            raise JobError(refused("accelerate.gathered-again"))
        number = self._own if self._own < self._cut.steps else _SPARE
        first = self._next

        def put_together(workers: Workers) -> list[Any]:
            replies = [workers.broadcast([number, own], rank) for rank in range(workers.world_size)]
            form = tuple[int, list[Any]]
            batches = dict(value_of(form, reply, "a worker's evaluated batch") for reply in replies)
            there: list[Any] = []
            while first + len(there) in batches:
                there.append(batches[first + len(there)])
            return [len(there), [_joined(parts) for parts in zip(*there, strict=True)]]

        count, parts = self._run.together(put_together)
        self._next += count
        return _on_device(self._run, parts if count else [leaf[:0] for leaf in own])

    def whole(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the results of a batch that every worker evaluates; from now on, all batches of this loop are such.

        Raises:
            JobError: batches are distributed already.
        """
        if self._is_shared:
            raise JobError(refused("accelerate.reduced-later"))
        self._gathered = _OFTEN
        return self._shared(leaves)

    def _shared(self, leaves: Sequence[Any]) -> list[Any]:
        # All have the same, but a worker that joins.
        own = [_plain(leaf) for leaf in leaves]
        return _on_device(self._run, self._run.together(lambda workers: own))

    def _batch(self, number: int) -> Any:
        run = self._run
        (batch,) = self._feed.source.load(ShardsRequest(EVALUATION_EPOCH, (self._cut.batch(number),)))
        seed_generators(stream_seed(run.job.seed, Stream.EVALUATION, run.inside.trained.progress.position.step, number))
        return to_device(batch, run.device)


class StreamEvaluation(EvaluationLoop):
    """A pass over a stream: every worker reads and evaluates all of it."""

    is_cut_short = False

    def __init__(self, run: Run, loader: DataLoader[Any]) -> None:
        self._run, self._loader, self._is_shared = run, loader, False
        self._next = 0

    @property
    def is_at_end(self) -> bool:
        """Whether the present batch is the last one, as far as the stream says its length."""
        return hasattr(self._loader.dataset, "__len__") and self._next >= len(self._loader)

    def batches(self) -> Iterator[Any]:
        """All batches."""
        self._run.inside.synchronisation.before_call()
        position = self._run.inside.trained.progress.position
        before = Generators.capture()
        seed_generators(stream_seed(self._run.job.seed, Stream.EVALUATION, position.step, 0))
        for batch in self._loader:
            self._next += 1
            yield to_device(batch, self._run.device)
        before.restore()

    def gather(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the results, which all workers have."""
        return self._shared(leaves)


def leaves_of(data: Any) -> list[Any]:
    """The tensors of a nested structure; or the structure itself, a list of plain values, if there are none.

    Raises:
        DataError: it is neither.
    """
    leaves: list[Any] = []
    try:
        recursively_apply(leaves.append, data, error_on_other_type=True)
    except TypeError:
        if not isinstance(data, list):
            raise DataError(refused("accelerate.gathered-other", kind=type(data).__name__)) from None
        return [data]
    return [torch.atleast_1d(leaf) for leaf in leaves]


def rebuilt(data: Any, leaves: Sequence[Any]) -> Any:
    """A structure like another one, with other leaves."""
    if leaves and isinstance(leaves[0], list):
        return leaves[0]
    in_order = iter(leaves)
    return recursively_apply(lambda _: next(in_order), data)


def from_main(run: Run, leaves: Sequence[Any]) -> list[Any]:
    """Return the main worker's results, on every worker."""
    return _on_device(run, run.broadcast([_plain(leaf) for leaf in leaves]))


def _plain(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _on_device(run: Run, leaves: Sequence[Any]) -> list[Any]:
    return [leaf.to(run.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    try:
        return torch.cat(list(parts))
    except RuntimeError as error:
        raise DataError(refused("accelerate.not-joined", error=error)) from None
