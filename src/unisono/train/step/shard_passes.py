"""The passes of a worker's shards, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from unisono.data.generators import generators_kept
from unisono.device import HostRead
from unisono.errors import LossError, ModelError
from unisono.train.step.gradients import Gradients
from unisono.train.step.loss import ForwardPass, Shard, total_weight
from unisono.train.step.part import EngineBase
from unisono.train.step.step import Call
from unisono.train.step.word import Field, ShardReport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Round:
    """Shards that the devices of a worker compute at the same time.

    Attributes:
        shards: the shards, one per device in the order of their ranks; fewer than devices in the last round.
        devices: the devices that report on these shards, in their order.
        own: the shard that this device computes. Passes through a model in slices are collective, so a device without a
            shard of its own computes another one's again.
        counts: whether the results on this device count.
    """

    shards: range
    devices: range
    own: int
    counts: bool


WorkerReport = tuple[Sequence[Any], Sequence[ShardReport], Sequence[bool]]
"""A report of devices: the values of fields, the reports of shards, and for each tensor whether shards used it."""


class ShardPasses:
    """Computes this worker's shards, one after the other.

    Attributes:
        takes_empty: whether there are passes for empty shards as well.
        unfound: a description of the origin of a value that is not finite, if it was found in no shard.
    """

    takes_empty = False
    unfound = "the sum of {}, though it is finite in each of them"

    def __init__(self, base: EngineBase, rounds_of: Callable[[range], Sequence[Round]]) -> None:
        self._workers, self._devices, self._prepared = base.workers, base.workers.devices, base.prepared
        self._buffers, self._has_buffers = base.buffers, bool(base.prepared.buffers)
        self._rank, self._spans, self._rounds_of = base.rank, base.spans, rounds_of
        self._is_compressed = base.job.compression != "none"
        self._forward = ForwardPass(base.job, base.prepared, base.device, base.spans)
        self.resplit()

    def resplit(self) -> None:
        """Distribute the shards of this worker, after another split among workers."""
        self.rounds = self._rounds_of(self._workers.transport.split.of(self._workers.rank))

    def compute(self, call: Call, gradients: Gradients, audited: Collection[int]) -> list[Shard]:
        """Compute all shards of this worker in a call, and send their gradients to the reducer.

        The results of audited shards are digested.

        Raises:
            LossError, ModelError, NondeterministicOperation: the user's loss function or model failed; names the shard.
        """
        shards = [Shard.of(call, turn.own, is_audited=turn.own in audited, counts=turn.counts) for turn in self.rounds]
        with generators_kept():
            for number, (shard, batch) in enumerate(zip(shards, call.shards, strict=True)):
                try:
                    self._compute(call, number, batch, gradients, shards)
                except (LossError, ModelError) as error:
                    raise self._placed(error, call, shard) from error
                self._workers.tick()
        if not shards:
            self._prepared.clear_gradients()
            gradients.serve(partial(self._weigh, call, []))
            self._workers.tick()
        return shards

    def again(self, call: Call, gradients: Gradients, number: int) -> str:
        """Compute a shard of any worker beside the attempt; returns the digest of its results."""
        with self._computed_again(call, gradients, number, loaded(call, number)) as (shard, results):
            assert shard.mark is not None, "it is audited"
            for index, parameter in enumerate(gradients.parameters):
                shard.mark.take(index, parameter.grad)
            return shard.mark.finish(shard.read(), results())

    def not_finite(self, call: Call, gradients: Gradients) -> tuple[int, int, float] | None:
        """Find the first of this worker's shards whose gradient is not finite, by computing shards again.

        Return its number in the batch, and the result of :meth:`Gradients.not_finite`.
        """
        own_shards = self._workers.transport.split.of(self._workers.rank)
        for number, batch in zip(own_shards, call.shards, strict=True):
            if len(call.batch.shard(number)):
                with self._computed_again(call, gradients, number, batch if call.load is None else call.load(number)):
                    if (where := gradients.not_finite(())) is not None:
                        return number, *where
        return None

    @contextmanager
    def _computed_again(
        self, call: Call, gradients: Gradients, number: int, batch: Any
    ) -> Iterator[tuple[Shard, Callable[[], Sequence[Tensor | None]]]]:
        """Compute a shard, whose gradients are in the parameters within the context; restore everything behind it."""
        shard = Shard.of(call, number, is_audited=True)
        holders = self._prepared.gradient_holders()
        gradients_before = [parameter.grad for parameter in holders]
        try:
            with generators_kept(), self._buffers.aside() as results:
                self._prepared.clear_gradients()
                self._forward.compute(call, shard, batch)
                if shard.report.weight:
                    shard.backward(gradients.parameters)
                else:
                    self._prepared.clear_gradients()
                yield shard, results
        finally:
            for parameter, gradient in zip(holders, gradients_before, strict=True):
                parameter.grad = gradient
        self._workers.tick()

    def figures(
        self,
        call: Call,
        elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext,
        further: Callable[[], Sequence[float]] = tuple,
    ) -> list[list[float]]:
        """Figures of each shard of a call, by passes that change neither weights nor buffers. Collective.

        ``elsewhere`` returns a context in which the shards' losses are computed; ``further`` is called after each shard
        with samples, and returns more figures of it. Return for each shard the loss, its weight, and the figures from
        ``further``.
        """
        self._buffers.begin()
        figures = list[list[float]]()
        try:
            with generators_kept():
                for turn, batch in zip(self.rounds, call.shards, strict=True):
                    shard = Shard.of(call, turn.own, is_audited=False)
                    if shard.samples:
                        self._buffers.open(first=not figures)
                        try:
                            with elsewhere():
                                self._forward.compute(call, shard, batch)
                        except (LossError, ModelError) as error:
                            raise self._placed(error, call, shard) from error
                    report = shard.read()
                    figures.append([report.loss, report.weight, *(further() if shard.samples else ())])
        finally:
            self._buffers.rewind()
        self._workers.tick()
        return [row for worker_rows in self._workers.gather_json(figures) for row in worker_rows]

    def log(self, name: str, value: float | HostRead) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        return self._forward.log(name, value)

    def of_worker(self, fields: Sequence[Field], report: WorkerReport) -> WorkerReport:
        """Return the report of all devices of this worker together. Collective among them."""
        return report

    def first_of_devices(self, value: T | None) -> T | None:
        """Return the value of the first device that has one. Collective among the devices of this worker."""
        return value

    def _compute(self, call: Call, number: int, batch: Any, gradients: Gradients, shards: Sequence[Shard]) -> None:
        shard, is_last = shards[number], number == len(shards) - 1
        self._prepared.clear_gradients()
        gradients.mark = shard.mark
        gradients.open(last=is_last)
        if shard.samples or self.takes_empty:
            if self._has_buffers:
                self._buffers.open(first=number == 0)
            self._forward.compute(call, shard, batch if shard.samples else loaded(call))
            gradients.computed()
        if self._has_buffers:
            self._take_buffers(number, shard)
        if is_last:
            gradients.send(partial(self._weigh, call, self._weights(shards)))
        if (weight := shard.report.weight) or self.takes_empty:
            if not (weight and shard.counts):
                gradients.leave_out()
            begun = perf_counter()
            with gradients.listening():
                shard.backward(gradients.parameters)
            if self._spans is not None:
                self._spans.add("backward", begun, perf_counter(), shard.number)
        else:
            self._prepared.clear_gradients()
        gradients.close()
        if weight and gradients.is_watched:
            shard.report.squared_norm = gradients.squared_norm() / (weight * call.scale) ** 2

    def _take_buffers(self, number: int, shard: Shard) -> None:
        """Take the results of a round's forward pass for the buffers."""
        if shard.samples and shard.counts:
            self._buffers.take(shard.number)

    def _weights(self, shards: Sequence[Shard]) -> list[float]:
        """The weights of all shards of this worker, in their order. Collective among its devices."""
        return [shard.report.weight for shard in shards]

    def _placed(self, error: LossError | ModelError, call: Call, shard: Shard | None) -> LossError | ModelError:
        """An error of the script, with step, shard and rank added to its message."""
        where = "" if shard is None else f", shard {call.first + shard.number}"
        return type(error)(f"step {call.step}{where}, rank {self._rank}: {error}")

    def _weigh(self, call: Call, weights: Sequence[float]) -> float | None:
        # Compressed sums are divided only after they are converted back to their own dtype.
        weight = total_weight(self._workers.transport, weights, call.decided)
        return None if self._is_compressed else weight * call.scale


def loaded(call: Call, number: int = 0) -> Any:
    """The batch of a shard; by default one that an empty shard can use for its passes."""
    assert call.load is not None, "the batch of any shard can be loaded"
    return call.load(number)
