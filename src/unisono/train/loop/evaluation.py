"""Metrics and predictions over a whole data set, distributed among the workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unisono.arguments import explain_call, require_types
from unisono.checkpoint.tensor_bytes import empty_as, form_of
from unisono.data.content import CONTENT, Contents, Glance
from unisono.data.feed import Feed, Options
from unisono.data.feeds import BatchFeed, StreamFeed, feed_of
from unisono.data.generators import generators_kept, seed_generators
from unisono.data.sample_order import LoopKey
from unisono.data.shards import Collate
from unisono.errors import DataError
from unisono.job import SAMPLES_PER_SHARD
from unisono.plan.order import Stream, stream_seed
from unisono.plan.tree import Node, SummationTree
from unisono.received import short
from unisono.train.config.numerics import autocast
from unisono.train.config.run_config import RunConfig
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.workers import Workers
from unisono.train.loop.blocks import (
    EVALUATION_EPOCH,
    NO_LOOP,
    BatchBlocks,
    BlockPlace,
    Blocks,
    CutBlocks,
    EvaluatedBlock,
    Shares,
    StreamBlocks,
)
from unisono.train.loop.prefetch import to_device
from unisono.train.model.prepared import Prepared
from unisono.train.step.loss import Weighted, as_number
from unisono.train.step.placement import Placement
from unisono.train.step.run_base import RunBase

R = TypeVar("R")

Metrics = Callable[[Any, Any], Mapping[str, Any]] | Mapping[str, Callable[[Any, Any], Any]]
"""``metrics(model, batch) -> {name: mean}``, or one function per name."""

Predict = Callable[[Any, Any], Any]
"""``predict_fn(model, batch) -> `` a tensor, or lists or dicts of tensors, with one row per sample."""


@dataclass(frozen=True)
class Evaluation:
    """One pass over a data set in blocks of a fixed size, so nothing depends on the number of workers."""

    config: RunConfig
    workers: Workers
    prepared: Prepared
    blocks: Blocks
    step: int
    placement: Placement

    def means(self, metrics: Metrics) -> dict[str, float]:
        """Return the weighted mean of each metric over all blocks.

        Raises:
            DataError: blocks returned different metrics, or there are none; or a model in stages has several functions.
        """
        if isinstance(metrics, Mapping):
            self.placement.require_functions(list(metrics))

        def row_of(block: EvaluatedBlock) -> dict[str, list[float]]:
            values = _call(metrics, self.prepared.model, block.batch)
            return {name: _weighted(name, values[name], block.samples) for name in sorted(values)}

        results, shares = self._shared(row_of)
        names = list(results[0]) if results else None
        if differing := next((sorted(row) for row in results if names is not None and sorted(row) != names), None):
            raise DataError(f"metrics returned {differing} for one batch and {names} for another")
        rows = [list(row.values()) for row in results]
        everybody = self.workers.gather_json(names)  # None for a worker without blocks
        agreed: list[str] = next(names for names in everybody if names is not None)
        other = next((names for names in everybody if names is not None and names != agreed), agreed)
        if other != agreed:
            raise DataError(f"metrics returned {other} for one batch and {agreed} for another")
        local = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(agreed), 2)
        table = self.workers.gather_rows(local, [len(sizes) for sizes in shares.sizes]).tolist()
        return {name: _mean([row[column] for row in table]) for column, name in enumerate(agreed)}

    def sums(self, add: Callable[[Any, Any], Tensor]) -> Tensor:
        """Add up the rows that a function returns for all blocks, along the summation tree.

        Args:
            add: a function that gets the model and a batch, and returns a row of numbers, always equally many.
        """
        rows, shares = self._shared(lambda block: add(self.prepared.model, block.batch).double())
        bounds = (0, *accumulate(len(sizes) for sizes in shares.sizes))
        tree, first = SummationTree(bounds[-1]), bounds[self.workers.rank]
        leaves = {Node(block, block + 1): row for block, row in enumerate(rows, first)}
        covers = [tree.cover(*block_range) for block_range in pairwise(bounds)]
        partials = [tree.finish(leaves, torch.add, node) for node in covers[self.workers.rank]]
        length = max(size or 0 for size in self.workers.gather_json(len(partials[0]) if partials else None))
        local = torch.stack(partials) if partials else torch.zeros(0, length, dtype=torch.float64)
        gathered = self.workers.gather_rows(local, [len(cover) for cover in covers])
        nodes = [node for cover in covers for node in cover]
        total: Tensor = tree.finish(dict(zip(nodes, gathered, strict=True)), torch.add)
        return total

    def outputs(self, predict_fn: Predict | None) -> Any:
        """Return the outputs for all samples, in the order of the data."""
        predict = predict_fn or _predict
        needs = "run.predict needs a function predict_fn(model, batch)"
        parts, shares = self._shared(lambda block: _called(predict, needs, self.prepared.model, block.batch))
        local = _concatenated(parts) if parts else None
        form = next(form for form in self.workers.gather_json(_form(local)) if form is not None)
        return self._gathered(local, form, shares)

    def values(self, function: Callable[[int, Any], Any], most: int | None = None) -> list[Any]:
        """Return what a function returns for each block, in the order of the blocks' places.

        Args:
            function: a function that gets a block's number and its batch, and returns numbers, text, tensors, or lists,
                tuples and dicts of them, of any shape.
            most: the number of blocks; all by default.
        """
        own_values = [value for *_, value in self._read(lambda block: function(block.number, block.batch), most)]
        ranks = range(self.workers.world_size)
        return [value for rank in ranks for value in self.workers.broadcast(own_values, rank)]

    def _shared(self, act: Callable[[EvaluatedBlock], R]) -> tuple[list[R], Shares]:
        """The results of this worker's blocks, and how much each worker has evaluated."""
        blocks = self._read(act)
        return [result for *_, result in blocks], self.blocks.shares(self.workers, [block[:2] for block in blocks])

    def _read(self, act: Callable[[EvaluatedBlock], R], most: int | None = None) -> list[tuple[BlockPlace, int, R]]:
        """The place, the samples and the result of each of this worker's blocks, in the order of places."""
        evaluate = self.placement.evaluate
        with closing(self._evaluated_blocks(most)) as blocks:
            read: list[Any] = [(block.place, block.samples, evaluate(partial(act, block))) for block in blocks]
        results = self.placement.evaluated([result for *_, result in read])
        read = [(place, samples, result) for (place, samples, _), result in zip(read, results, strict=True)]
        return sorted(read, key=itemgetter(0))

    def _evaluated_blocks(self, most: int | None) -> Generator[EvaluatedBlock, None, None]:
        with (
            evaluating(self.prepared.modules) as put_back,
            torch.no_grad(),
            generators_kept(),
            closing(self.blocks.read(self.workers, most)) as blocks,
        ):
            for block in blocks:
                on_device = block._replace(batch=to_device(block.batch, self.config.device))
                seed_generators(stream_seed(self.config.job.seed, Stream.EVALUATION, self.step, *block.place))
                with autocast(self.config.job, self.config.device):
                    yield on_device
                put_back()
                self.workers.tick()

    def _gathered(self, local: Any, form: Any, shares: Shares) -> Any:
        if isinstance(form, dict):
            return {key: self._gathered(local and local[key], part, shares) for key, part in form["parts"].items()}
        if form[0] == "list":
            return [self._gathered(local and local[number], part, shares) for number, part in enumerate(form[1])]
        if local is None:
            local = empty_as(form, self.config.device)
        counts = [sum(sizes) for sizes in shares.sizes]
        if local.dim() == 0 or len(local) != counts[self.workers.rank]:
            raise DataError(
                f"predict_fn returned outputs of shape {list(local.shape)} for {counts[self.workers.rank]} samples: "
                f"return one row per sample"
            )
        rows = self.workers.gather_rows(local, counts)
        return rows if shares.order is None else rows[shares.order.to(rows.device)]


class Evaluator:
    """Evaluates the model of a run, between its steps."""

    def __init__(self, run: RunBase, collectives: CollectiveCalls) -> None:
        self.is_under_way = False
        self._run, self._collectives, self._job = run, collectives, run.config.job
        self._timeout_s, self._contents = run.config.settings.faults.timeout_s, Contents(looks_again=False)

    def carry_out(
        self, action: Callable[[Evaluation], R], dataset: Any, batch_size: int | None, collate: Collate | None
    ) -> R:
        """Evaluate as one collective call.

        Args:
            action: a function that gets the evaluation, and returns its result.
            dataset: a map-style data set with a length, a stream, or a ``DataLoader``; the same on all workers.
            batch_size: the samples per call; by default as many as a training shard has.
            collate: a function that makes a batch of a list of samples; None for torch's ``default_collate``.

        Raises:
            JobMismatch: the data sets differ.
        """
        require_types(Evaluator.carry_out, {"batch_size": batch_size})
        run, job = self._run, self._job
        prepared = run.trained.require_prepared()
        options = Options(batch_size=batch_size, collate_fn=collate)
        key = LoopKey(job.seed, NO_LOOP)
        feed = feed_of(dataset, options, key, self._timeout_s)
        size = batch_size or feed.batch_size or -(-(job.batch_size or SAMPLES_PER_SHARD * job.shards) // job.shards)
        self.agree(dataset, feed, size)
        blocks, step = self._blocks(feed, size), run.trained.progress.position.step
        self.is_under_way = True
        try:
            return self._collectives.together(
                lambda workers: action(Evaluation(run.config, workers, prepared, blocks, step, run.placement))
            )
        finally:
            self.is_under_way = False

    def agree(self, dataset: Any, feed: Feed | StreamFeed, size: int) -> None:
        """Refuse to evaluate other data than the other workers. Collective.

        ``size`` is the number of samples in a block.

        Raises:
            JobMismatch: the data sets differ.
        """
        content = self._contents.of(dataset, feed, Glance(self._job.shards, size * self._job.shards, EVALUATION_EPOCH))
        self._collectives.agree("data set", {**feed.same(), CONTENT: content}, feed.cure)

    def _blocks(self, feed: Feed | StreamFeed, size: int) -> Blocks:
        if isinstance(feed, BatchFeed):
            return BatchBlocks(feed.stream, self._job.shards)
        if isinstance(feed, StreamFeed):
            return StreamBlocks(feed, self._job.shards, size)
        cut = feed.order.cut(EVALUATION_EPOCH, size)
        if not cut.steps:
            raise DataError("the loader has no batch to evaluate: drop_last or its sampler leaves nothing")
        return CutBlocks(feed, cut)


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
    """Have modules evaluate. It yields a function that restores their buffers.

    Evaluation must not train: neither modes nor buffers stay changed.
    """
    layers = [layer for module in modules for layer in module.modules()]
    training = [layer.training for layer in layers]
    kept_buffers = [_KeptBuffer(layer._buffers, name) for layer in layers for name in layer._buffers]

    def put_back() -> None:
        for buffer in kept_buffers:
            buffer.put_back()

    for module in modules:
        module.eval()
    try:
        yield put_back
    finally:
        put_back()
        for layer, was_training in zip(layers, training, strict=True):
            layer.training = was_training


class _KeptBuffer:
    """A buffer's value before an evaluation. Workers evaluate different blocks, so none may leave a trace in it."""

    def __init__(self, buffers: dict[str, Tensor | None], name: str) -> None:
        self._buffers, self._name, self._buffer = buffers, name, buffers[name]
        self._value = None if self._buffer is None else self._buffer.detach().clone()
        self._version = self._written()

    def put_back(self) -> None:
        self._buffers[self._name] = self._buffer
        if self._buffer is not None and self._value is not None and self._written() != self._version:
            self._buffer.detach().copy_(self._value)
            self._version = self._written()

    def _written(self) -> int:
        return 0 if self._buffer is None or self._buffer.is_inference() else self._buffer._version


def _called(function: Callable[..., Any], needs: str, model: Any, batch: Any) -> Any:
    try:
        return function(model, batch)
    except TypeError as error:
        explain_call(error, function, needs)
        raise


def _call(metrics: Metrics, model: Any, batch: Any) -> Mapping[str, Any]:
    needs = "run.evaluate needs a function metrics(model, batch), or a dict of such functions by name"
    if isinstance(metrics, Mapping):
        return {name: _called(metric, needs, model, batch) for name, metric in metrics.items()}
    values = _called(metrics, needs, model, batch)
    if not isinstance(values, Mapping):
        raise DataError(f"the metrics function returned a {type(values).__name__}: return a dict of means by name")
    return values


def _weighted(name: str, value: Any, samples: int) -> list[float]:
    mean, weight = (value.loss, value.weight) if isinstance(value, Weighted) else (value, samples)
    numbers = [as_number(mean), as_number(weight)]
    if None in numbers:
        raise DataError(
            f"metrics returned {short(value)} as {name!r}: return its mean, one number; for a mean over something "
            f"else than samples, such as tokens, return unisono.Weighted(mean, tokens)"
        )
    return [number for number in numbers if number is not None]


def _mean(pairs: Sequence[Sequence[float]]) -> float:
    tree = SummationTree(len(pairs))

    def total(values: Sequence[float]) -> float:
        leaves = {Node(block, block + 1): value for block, value in enumerate(values)}
        return tree.finish(leaves, lambda left, right: left + right)

    weight = total([share for _, share in pairs])
    return total([mean * share if share else 0.0 for mean, share in pairs]) / weight if weight else float("nan")


def _predict(model: Any, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, list | tuple) else batch)


def _concatenated(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            raise DataError("predict_fn returned a single number for a batch: return one row per sample")
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        if not all(isinstance(key, str) for key in first):
            raise DataError(f"predict_fn returned a dict with the keys {list(first)}: name outputs by text")
        return {key: _concatenated([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return [_concatenated([part[number] for part in parts]) for number in range(len(first))]
    raise DataError(f"predict_fn returned a {type(first).__name__}: return a tensor, or lists or dicts of tensors")


def _form(local: Any) -> Any:
    if local is None:
        return None
    if isinstance(local, dict):
        return {"parts": {key: _form(part) for key, part in local.items()}}
    if isinstance(local, list):
        return ["list", [_form(part) for part in local]]
    dtype, shape = form_of(local)
    return [dtype, [0, *shape[1:]]]
