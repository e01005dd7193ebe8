"""The passes of a worker's shards, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.data.streams import generators_kept
from unisono.device import HostRead
from unisono.errors import LossError, ModelError
from unisono.job import Job
from unisono.spans import Spans
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Round, Workers
from unisono.train.model.buffers import Buffers
from unisono.train.model.prepared import Prepared
from unisono.train.step.gradients import Gradients
from unisono.train.step.loss import ForwardPass, Shard, total_weight
from unisono.train.step.step import Call
from unisono.train.step.weights_watch import ForwardWrites

if TYPE_CHECKING:
    from unisono.train.step.pipeline import Pipeline

from dataclasses import asdict
from typing import TypeVar

from unisono.received import value_of
from unisono.reduce.tally import PRIME
from unisono.train.group.control import Balance, Flags, ShardReport, any_of
from unisono.train.group.workers import Devices
from unisono.words import MODULUS

T = TypeVar("T")

_TOLD = tuple[list[ShardReport], list[bool], Flags, tuple[int, int]]


def shared_weights(devices: Devices, rounds: Sequence[Round], shards: Sequence[Shard]) -> list[float]:
    """The weights of all shards of the worker, in their order. Collective among the devices.

    Args:
        devices: the devices of the worker.
        rounds: the rounds of its shards.
        shards: what this device computes in each round.
    """
    own = [shard.report.weight for shard in shards]
    return _in_order(devices.gather(own), rounds) if devices.count > 1 else own


def shared_buffers(devices: Devices, turn: Round, buffers: Buffers) -> None:
    """Have what each shard of a round has made of the buffers on all devices. Collective among them."""
    if devices.count == 1 or not len(buffers):
        return
    for source, shard in enumerate(turn.shards):
        made = list(buffers.result(shard)) if source == devices.rank else None
        if made := devices.inside.broadcast(made, source):  # an empty shard has made nothing
            buffers.set_result(shard, made)


def shared_report(
    devices: Devices, rounds: Sequence[Round], reports: Sequence[ShardReport], used: Sequence[bool], flags: Flags
) -> tuple[Sequence[ShardReport], Sequence[bool], Flags]:
    """The reports of all shards of the worker, what they have used, and the flags of all its devices as one.

    Collective among the devices.

    Args:
        devices: the devices of the worker.
        rounds: the rounds of its shards.
        reports: the report of this device's shard of each round.
        used: the flags of the tensors that its shards have used.
        flags: what it has to say.
    """
    if devices.count == 1:
        return reports, used, flags
    in_stages = devices.losses is not None
    # One of the devices that hold stages has all losses. They have other tensors, and each tells of its own.
    said = devices.gather(
        told_of(reports if devices.losses in (None, devices.rank) else (), () if in_stages else used, flags)
    )
    told = [value_of(_TOLD, each, "what another device told") for each in said]
    every_report, every_used, every_flags, balances = zip(*told, strict=True)
    is_used = used if in_stages else [any(each) for each in zip(*every_used, strict=True)]
    return _in_order(every_report, rounds), is_used, _merged(every_flags, balances)


def told_of(reports: Sequence[ShardReport], used: Sequence[bool], flags: Flags) -> list[Any]:
    """What a device tells the others of it, as JSON."""
    plain = asdict(flags)
    balance, copies = plain.pop("balance")
    return [[asdict(report) for report in reports], list(map(bool, used)), plain, [balance % MODULUS, copies % PRIME]]


def _in_order(told: Sequence[Sequence[T]], rounds: Sequence[Round]) -> list[T]:
    """What devices told of their shard of each round, in the order of the shards."""
    return [told[device][turn] for turn, each in enumerate(rounds) for device in each.devices]


def _merged(flags: Sequence[Flags], balances: Sequence[tuple[int, int]]) -> Flags:
    """One worker's flags, of which each device has slices, and a memory of its own."""
    return Flags(
        **any_of(flags),
        digest=sum(each.digest for each in flags) % MODULUS,
        amiss=sum(each.amiss for each in flags) % MODULUS,
        timings=flags[0].timings,
        balance=Balance(*(sum(each) for each in zip(*balances, strict=True))),
    )


@dataclass(frozen=True, eq=False)
class EngineBase:
    """The base of an engine's parts.

    Attributes:
        job: the job to train.
        workers: the workers of the generation.
        prepared: models and optimizers.
        device: the device on which to compute.
        execution: the settings of the computation that decide no bit.
        buffers: what shards make of the buffers.
        rank: this worker's rank in messages.
        spans: the worker's spans, if they are kept.
    """

    job: Job
    workers: Workers
    prepared: Prepared
    device: torch.device
    execution: Execution
    buffers: Buffers
    rank: int
    spans: Spans | None


class ShardPasses:
    """Computes this worker's shards, one after the other, or in the stages of its devices.

    Args:
        base: the base of the engine.
        pipeline: what computes where the devices of this worker hold stages.
    """

    def __init__(self, base: EngineBase, pipeline: Pipeline | None) -> None:
        self._workers, self._devices, self._prepared = base.workers, base.workers.devices, base.prepared
        self._buffers, self._rank, self._spans, self._pipeline = base.buffers, base.rank, base.spans, pipeline
        self._is_compressed = base.job.compression != "none"
        self._forward = ForwardPass(base.job, base.prepared, base.device, base.spans)
        self._writes = ForwardWrites(base.prepared.weights())

    def compute(self, call: Call, gradients: Gradients, audited: Collection[int]) -> list[Shard]:
        """Compute all shards of this worker in a call, and hand their gradients on.

        Args:
            call: the call.
            gradients: the gradients of the call, of which a step has begun.
            audited: the numbers of the shards whose results are marked.

        Raises:
            LossError, ModelError, NondeterministicOperation: the user's loss function or model; names the shard.
        """
        rounds = self.rounds
        shards = [Shard.of(call, turn.own, is_audited=turn.own in audited, counts=turn.counts) for turn in rounds]
        self._writes.begin()
        with generators_kept():
            if self._pipeline is not None:
                self._compute_stages(self._pipeline, call, gradients, shards)
            else:
                for turn, shard, batch in zip(rounds, shards, call.shards, strict=True):
                    self._compute(call, turn, shard, batch, gradients, shards)
                    self._workers.tick()
        with self._told(f"step {call.step}"):
            self._writes.require_none()
        if not shards:
            self._prepared.clear_gradients()
            gradients.serve(partial(self._weigh, call, []))
            self._workers.tick()
        return shards

    def again(self, call: Call, gradients: Gradients, number: int) -> str:
        """Compute a shard, of whichever worker, beside the attempt; returns the digest of its results."""
        assert call.load is not None, "what is audited can be loaded"
        with self._computed_again(call, gradients, number, call.load(number)) as (shard, made):
            assert shard.mark is not None, "it is audited"
            for each, parameter in enumerate(gradients.parameters):
                shard.mark.take(each, parameter.grad)
            return shard.mark.finish(shard.read(), made())

    def not_finite(self, call: Call, gradients: Gradients) -> tuple[int, int, float] | None:
        """The first of this worker's shards whose gradient is not finite, computed again beside the attempt.

        Returns:
            the shard's number in the batch, and what :meth:`Gradients.not_finite` says of it.
        """
        mine = self._workers.transport.split.of(self._workers.rank)
        for number, batch in zip(mine, call.shards, strict=True):
            if len(call.batch.shard(number)):
                with self._computed_again(call, gradients, number, batch if call.load is None else call.load(number)):
                    if (where := gradients.not_finite(None)) is not None:
                        return number, *where
        return None

    @contextmanager
    def _computed_again(
        self, call: Call, gradients: Gradients, number: int, batch: Any
    ) -> Iterator[tuple[Shard, Callable[[], Sequence[Tensor | None]]]]:
        """A shard's gradients lie where its backward pass leaves them in here; afterwards all is as it was."""
        shard = Shard.of(call, number, is_audited=True)
        holders = self._prepared.gradient_holders()
        held = [parameter.grad for parameter in holders]
        with generators_kept(), self._buffers.aside() as made:
            self._prepared.clear_gradients()
            self._forward.compute(call, shard, batch)
            if shard.report.weight:
                shard.backward(gradients.parameters)
            else:
                self._prepared.clear_gradients()
            yield shard, made
        for parameter, gradient in zip(holders, held, strict=True):
            parameter.grad = gradient
        self._workers.tick()

    def figures(
        self,
        call: Call,
        elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext,
        further: Callable[[], Sequence[float]] = tuple,
    ) -> list[list[float]]:
        """Figures of each shard of a call, by passes that change neither weights nor buffers. Collective.

        Args:
            call: the call.
            elsewhere: a function that returns a context in which the shards' losses are computed.
            further: a function that is called after each shard with samples, and returns more figures of it.

        Returns:
            by shard: the loss, its weight, and what ``further`` has returned.
        """
        self._buffers.begin()
        told = list[list[float]]()
        try:
            with generators_kept():
                for turn, batch in zip(self.rounds, call.shards, strict=True):
                    shard = Shard.of(call, turn.own, is_audited=False)
                    if shard.samples:
                        self._buffers.open(first=not told)
                        with self._told(f"step {call.step}, shard {shard.number}"), elsewhere():
                            self._forward.compute(call, shard, batch)
                    report = shard.read()
                    told.append([report.loss, report.weight, *(further() if shard.samples else ())])
        finally:
            self._buffers.rewind()
        self._workers.tick()
        return [row for one in self._workers.gather_json(told) for row in one]

    def log(self, name: str, value: float | HostRead) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        return self._forward.log(name, value)

    @property
    def rounds(self) -> Sequence[Round]:
        """The rounds of this worker's shards."""
        return self._devices.rounds(self._workers.transport.split.of(self._workers.rank))

    def _compute(
        self, call: Call, turn: Round, shard: Shard, batch: Any, gradients: Gradients, shards: Sequence[Shard]
    ) -> None:
        self._prepared.clear_gradients()
        gradients.mark = shard.mark
        gradients.open(last=shard is shards[-1])
        with self._told(f"step {call.step}, shard {call.first + shard.number}"):
            if not shard.samples and self._devices.count > 1:  # passes are collective, so it takes part with another's
                assert call.load is not None, "the batch of any shard can be loaded"
                batch = call.load(0)
            if shard.samples or self._devices.count > 1:
                self._buffers.open(first=shard is shards[0])
                self._forward.compute(call, shard, batch)
                gradients.computed()
            if shard.samples and shard.counts:
                self._buffers.take(shard.number)
            shared_buffers(self._devices, turn, self._buffers)
            if shard is shards[-1]:
                gradients.send(partial(self._weigh, call, shared_weights(self._devices, self.rounds, shards)))
            if shard.report.weight or self._devices.count > 1:
                if not (shard.report.weight and shard.counts):
                    gradients.leave_out()
                begun = perf_counter()
                with gradients.listening():
                    shard.backward(gradients.parameters)
                if self._spans is not None:
                    self._spans.add("backward", begun, perf_counter(), shard.number)
            else:
                self._prepared.clear_gradients()
            gradients.close()
            if shard.report.weight:
                shard.report.squared_norm = gradients.squared_norm() / (shard.report.weight * call.scale) ** 2

    def _compute_stages(self, pipeline: Pipeline, call: Call, gradients: Gradients, shards: Sequence[Shard]) -> None:
        """The devices of this worker compute all its shards together."""
        self._prepared.clear_gradients()
        with self._told(f"step {call.step}"):
            weights = pipeline.compute(call, shards, gradients, self._buffers, self._forward, self._workers.tick)
        gradients.send(partial(self._weigh, call, weights))
        pipeline.finish(gradients)

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        try:
            yield
        except (LossError, ModelError) as error:
            raise type(error)(f"{where}, rank {self._rank}: {error}") from error

    def _weigh(self, call: Call, weights: Sequence[float]) -> float | None:
        # What is compressed is divided only when it is wide again.
        weight = total_weight(self._workers.transport, weights, call.decided)
        return None if self._is_compressed else weight * call.scale
