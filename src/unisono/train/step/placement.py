"""Where a model lies: whole on the one device of a worker, or spread over several, which then act as one worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.checkpoint.snapshot import Digests, Snapshot
from unisono.checkpoint.tensor_bytes import WHOLE, Share
from unisono.errors import JobError, ModelError
from unisono.received import value_of
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.slices import held_whole, slice_of, whole_gradient
from unisono.train.state.sliced_state import sliced_share, sliced_state
from unisono.train.step.gradients import Gradients, GradientsInPlace
from unisono.train.step.loss import Shard
from unisono.train.step.part import EngineBase
from unisono.train.step.shard_passes import Round, ShardPasses, WorkerReport
from unisono.train.step.step import global_norm, norm_one_by_one
from unisono.train.step.summed_gradients import SummedGradients
from unisono.train.step.word import Field, ShardReport

R = TypeVar("R")
T = TypeVar("T")


class Placement:
    """A model that lies whole on the one device of a worker. Subclasses spread models over several devices.

    Attributes:
        rounds: a function that distributes shards among the devices of a worker; its results are kept, since each step
            calls it several times.
    """

    def __init__(self, prepared: Prepared, workers: Workers) -> None:
        self._prepared, self._workers, self._devices = prepared, workers, workers.devices
        self.rounds: Callable[[range], Sequence[Round]] = lru_cache(maxsize=8)(self._rounds)

    def require(self, state: Mapping[str, Any] | None) -> None:
        """Refuse models, optimizers and further state that cannot be trained in this placement.

        Raises:
            ModelError: names what cannot be trained.
        """

    def require_whole(self, refusal: str) -> None:
        """Refuse a feature that needs whole weights, if a device does not hold them.

        ``refusal`` says what to do, with a place for the number of devices.

        Raises:
            JobError: a device does not hold them.
        """

    def require_functions(self, names: Sequence[str]) -> None:
        """Refuse to evaluate several functions, if the model can be called only once.

        Raises:
            DataError: it can be called only once, and there are several.
        """

    @property
    def gradients(self) -> Callable[..., Gradients]:
        """The class that makes the gradients of a call, for the present number of shards; see :class:`Gradients`."""
        return GradientsInPlace if self._workers.transport.tree.shards == 1 else SummedGradients

    def passes(self, base: EngineBase) -> ShardPasses:
        """The object that computes the shards of this worker in a generation."""
        return ShardPasses(base, self.rounds)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together. Collective among the devices."""
        return global_norm(parameters)

    def evaluate(self, act: Callable[[], R]) -> R | None:
        """The result of a function that calls the model once; None on a device that does not get a result."""
        return act()

    def evaluated(self, results: list[Any]) -> list[Any]:
        """The results of several calls of :meth:`evaluate`, on all devices. Collective among them."""
        return results

    def give(self, snapshot: Snapshot, verified: Digests | None) -> tuple[Snapshot, Digests | None, Share]:
        """The contents of a checkpoint. Collective among the devices.

        Returns:
            the state that all devices of this worker hold, the digests for a checkpoint of it, and the share that this
                device writes. Tensors that other devices write are on the meta device.
        """
        return snapshot, verified, WHOLE

    def take(self, snapshot: Snapshot) -> Snapshot:
        """This device's part of a whole snapshot. Tensors of other models are left as they are."""
        return snapshot

    def _rounds(self, shards: range) -> Sequence[Round]:
        return [Round(range(shard, shard + 1), range(1), shard, counts=True) for shard in shards]


class SpreadPlacement(Placement):
    """A model of which each device of a worker holds a part."""

    def require_whole(self, refusal: str) -> None:
        """Refuse every feature that needs whole weights."""
        raise JobError(refusal.format(self._devices.count))

    def passes(self, base: EngineBase) -> SpreadPasses:
        """The object that makes the passes of all devices together."""
        return SpreadPasses(base, self.rounds)

    def give(self, snapshot: Snapshot, verified: Digests | None) -> tuple[Snapshot, Digests | None, Share]:
        """The contents of a checkpoint: each tensor is made whole on the device that writes it."""
        return sliced_share(self._prepared, snapshot, self._devices)

    def take(self, snapshot: Snapshot) -> Snapshot:
        """This device's parts of a whole snapshot."""
        return sliced_state(self._prepared, snapshot)


class SpreadPasses(ShardPasses):
    """Passes that all devices of a worker make together. A device without a shard computes another device's again."""

    takes_empty = True
    # A shard takes several devices, so that none can compute it again by itself to find the origin.
    unfound = "one of {}"

    def of_worker(self, fields: Sequence[Field], report: WorkerReport) -> WorkerReport:
        """The values, reports and flags of all devices of this worker; each shard's report counts once."""
        values, reports, used = report
        form = tuple[list[bool | int | float], list[ShardReport], list[bool]]
        own = [list(values), [asdict(report) for report in reports], list(map(bool, used))]
        replies = [value_of(form, reply, "the report of another device") for reply in self._devices.gather(own)]
        every_value, every_report, every_used = zip(*replies, strict=True)
        by_field = zip(fields, zip(*every_value, strict=True), strict=True)
        merged = [field.of_devices(device_values) for field, device_values in by_field]
        return merged, self._in_order(every_report), [any(flags) for flags in zip(*every_used, strict=True)]

    def first_of_devices(self, value: T | None) -> T | None:
        """Return the value of the first device that has one. Collective among the devices of this worker."""
        return next(filter(None, self._devices.gather(value)), None)

    def not_finite(self, call: Any, gradients: Gradients) -> None:
        """None: computing a shard again takes all devices, and some of them may have other shards."""

    def _take_buffers(self, number: int, shard: Shard) -> None:
        """Give all devices what each shard of a round has made of the buffers. Collective among them."""
        super()._take_buffers(number, shard)
        for source, source_shard in enumerate(self.rounds[number].shards):
            results = list(self._buffers.result(source_shard)) if source == self._devices.rank else None
            if results := self._devices.inside.broadcast(results, source):  # an empty shard has no results
                self._buffers.set_result(source_shard, results)

    def _weights(self, shards: Sequence[Shard]) -> list[float]:
        return self._in_order(self._devices.gather(super()._weights(shards)))

    def _in_order(self, device_values: Sequence[Sequence[T]]) -> list[T]:
        """Values of devices for their shards of each round, in the order of the shards."""
        return [device_values[device][number] for number, turn in enumerate(self.rounds) for device in turn.devices]


# Tensor parallelism: each device adds up the gradients of its parts over all shards of its worker.


class ParallelGradients(SummedGradients):
    """The gradients of this device's parts of a model whose devices compute each shard together.

    If torch holds a parameter as a ``DTensor``, the part of this device is taken; any other parameter has the same
    gradient on all devices.
    """

    def begin(self, step: int = 0) -> None:
        """Forget the last step; the shards of this worker follow."""
        super().begin(step)
        self._counts = True
        for parameter in self.parameters:
            _move(parameter)
            parameter.grad = None

    def open(self, *, last: bool) -> None:
        """Begin the next shard."""
        super().open(last=last)
        self._counts = True

    def leave_out(self) -> None:
        """Ignore the gradients of the passes under way."""
        self._counts = False

    @torch.no_grad()
    def close(self) -> None:
        """End the shard."""
        for parameter in self.parameters:
            _move(parameter)
            if not self._counts:
                parameter.grad = None
        super().close()

    def _hooked(self) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            (held_whole(parameter) if held_whole(parameter) is not None else parameter)  # type: ignore[union-attr]
            .register_post_accumulate_grad_hook(partial(self._arrive_held, number))
            for number, parameter in enumerate(self.parameters)
        ]

    @torch.no_grad()
    def _arrive_held(self, number: int, held: Tensor) -> None:
        if self._listens:
            parameter = self.parameters[number]
            _move(parameter)
            if not self._counts:
                parameter.grad = None
            self._arrive(number, parameter)


def _move(parameter: Tensor) -> None:
    """Move the gradient from torch's own object for a parameter to this device's part of it."""
    held: Any = held_whole(parameter)
    if held is None or held.grad is None:
        return
    gradient = held.grad
    if gradient.placements != held.placements:  # it may be a sum over the devices that is yet to be made, for instance
        gradient = gradient.redistribute(placements=held.placements)
    local = gradient.to_local()
    parameter.grad, held.grad = local.wait() if hasattr(local, "wait") else local, None


class TensorParallel(SpreadPlacement):
    """A model in tensor parallelism: all devices compute each shard, each with its parts of layers."""

    @property
    def gradients(self) -> Callable[..., Gradients]:
        """The class of gradients for parts of parameters."""
        return ParallelGradients

    def require(self, state: Mapping[str, Any] | None) -> None:
        """Refuse parameters that belong to no module: their optimizer was made before ``run.parallelize``."""
        prepared = self._prepared
        members = {id(slice_of(tensor)) for module in prepared.modules for tensor in module.parameters()}
        if stranger := next((name for name, tensor in prepared.parameters.items() if id(tensor) not in members), ""):
            raise ModelError(
                f"{stranger} belongs to no module: make the optimizer after run.parallelize, which puts other "
                f"parameters into the layers"
            )

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients, which are made whole one after the other."""
        return norm_one_by_one(whole_gradient(parameter) for parameter in parameters if parameter.grad is not None)
