"""Computes the shards of a worker whose devices hold stages, by the schedules of torch's pipelining."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from unisono.adapt.squared_norms import SquaredNorms
from unisono.errors import JobError, LossError, WorkerLost
from unisono.jsonl import append_line, open_lines
from unisono.plan.tree import Summand, most_kept
from unisono.reduce.buckets import Bucket, plan_buckets
from unisono.reduce.partial_sums import PartialSumRow, PartialSums
from unisono.reduce.reducer import Reducer
from unisono.spans import Spans
from unisono.train.group.workers import Devices
from unisono.train.model.buffers import Buffers
from unisono.train.model.elsewhere import NOT_HANDED_ON, Elsewhere
from unisono.train.model.prepared import Prepared
from unisono.train.model.stages import LOOPED
from unisono.train.model.staging import Left, Received, Staging
from unisono.train.step.gradients import Fusion, Gradients
from unisono.train.step.loss import ForwardPass, Shard
from unisono.train.step.pipeline_stage import BlockStage, quiet
from unisono.train.step.step import Call


class StagedGradients(Gradients):
    """The gradients of the stages that this device holds.

    A block's gradients of a shard are there after its backward pass, in whatever order a schedule computes blocks and
    shards; then they are put where that shard belongs in the summation tree. No bucket has those of two blocks.

    Where the next shard is added onto this one before anything else is, the gradients stay where they are, and autograd
    adds them up itself: the same addition, without a copy. A gradient that arrives in several parts it would add in
    another order, and a hook of the script would see a sum: then the step is computed again, and each shard taken.

    Args:
        parameters: the parameters of this device, by name.
        staging: the stages.
        order: the places of a block's shards, among those of this worker, in the order of their backward passes.
        reducer: the reducer that adds up the gradients of all workers.
        fusion: the settings of the buckets.
        norms: a counter that stays unused.
    """

    leaves_single = False

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        staging: Staging,
        order: Sequence[int],
        reducer: Reducer,
        fusion: Fusion,
        norms: SquaredNorms,
    ) -> None:
        self._blocks_of = [staging.block_of(name) for name in parameters]
        self._blocks: list[int] = []
        self._order = order
        # Not where each shard's gradient is rounded first, nor where the schedule adds: that knows no shared memory.
        self._adds_up = fusion.compressed is None and staging.placement.schedule != "interleaved-zero-bubble"
        super().__init__(parameters, reducer, fusion, norms)
        self._remaining: dict[int, list[tuple[int, bool]]] = {}
        self._sums_so_far: dict[int, tuple[Tensor, int]] = {}

    def begin(self, step: int = 0) -> None:
        """Forget what was taken before; the shards of this worker follow."""
        super().begin(step)
        ends = [shard == summand.shards[-1] for summand in self._summands() for shard in summand.shards]
        self._remaining = {block: list(zip(self._order, ends, strict=True))[::-1] for block in self._blocks}
        self._sums_so_far = {}

    def stop_listening(self) -> None:
        """From now on take the gradients of each shard by themselves. Collective."""
        self._adds_up = False
        self._sums = self._allocated_sums()

    @torch.no_grad()
    def take(self, block: int, place: int) -> None:
        """The backward pass of a block is done, for one shard: take its gradients, or see that they may stay.

        Args:
            block: the block.
            place: the place of the shard, among those of this worker. An empty one has added nothing.
        """
        if block not in self._remaining:
            return  # nothing in it is trained
        expected, ends_summand = self._remaining[block].pop()
        assert expected == place, "shards come in the order of the schedule"
        for number, (bucket, sums, tally) in enumerate(zip(self._buckets, self._sums, self._tallies, strict=True)):
            if self._blocks[number] == block:
                for entry in bucket.entries:
                    self._see(entry.index, ends_summand=ends_summand)
                if ends_summand:
                    own = [self.parameters[entry.index] for entry in bucket.entries]
                    sums.open()
                    sums.put_all([parameter.grad for parameter in own], tally)
                    sums.close()
                    for parameter in own:
                        parameter.grad = None

    def _see(self, number: int, *, ends_summand: bool) -> None:
        """Look whether a parameter's gradient is what one addition has made of it, if any."""
        parameter, before = self.parameters[number], self._sums_so_far.pop(number, None)
        if (gradient := parameter.grad) is None:
            return
        self._note(number, gradient)
        if before is not None:
            self.came_twice |= gradient is not before[0] or gradient._version > before[1] + 1
        if not ends_summand:
            self.came_twice |= bool(parameter._post_accumulate_grad_hooks) or gradient.dtype != parameter.dtype
            self._sums_so_far[number] = gradient, gradient._version

    def finish(self) -> None:
        """All shards are done, and their weights are known: all may be reduced."""
        for number, (sums, tally) in enumerate(zip(self._sums, self._tallies, strict=True)):
            self._reducer.ready(number, sums.partials(), tally)

    def _planned(self, fusion: Fusion) -> tuple[Bucket, ...]:
        found: list[Bucket] = []
        for block in sorted(set(self._blocks_of), reverse=True):
            numbers = [number for number, of in enumerate(self._blocks_of) if of == block]
            own = [self.parameters[number] for number in numbers]
            for bucket in plan_buckets(own, fusion.bucket_bytes, fusion.compressed):
                entries = tuple(replace(entry, index=numbers[entry.index]) for entry in bucket.entries)
                found.append(replace(bucket, entries=entries))
                self._blocks.append(block)
        return tuple(found)

    def _hooked(self) -> list[torch.utils.hooks.RemovableHandle]:
        return []  # some schedules compute gradients of weights past them

    def _summands(self) -> Sequence[Summand]:
        transport = self._reducer.transport
        mine = transport.split.of(transport.rank)
        shards = [mine[place] for place in self._order]
        return transport.tree.longest_summands(shards) if self._adds_up else transport.tree.summands(shards)

    def _allocated_sums(self) -> list[PartialSums]:
        summands = self._summands()
        rows = self._reducer.transport.allocate(self._buckets, max(1, most_kept(summands)))
        return [
            PartialSums(summands, [PartialSumRow.of(bucket, flats[number]) for flats in rows])
            for number, bucket in enumerate(self._buckets)
        ]


_SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
}


class Passes:
    """What the blocks of a device compute in one attempt.

    Args:
        call: what to compute.
        shards: the shards of the worker.
        gradients: what takes the gradients.
        buffers: the buffers of this device.
        forward: what calls the loss function.
        staging: the stages.
        tick: a function that is called when this device has got on.
        spans: the spans of this device, if they are kept.

    Attributes:
        weights: the weights of the shards, which go from the last stage to all others with what goes back.
    """

    def __init__(
        self,
        call: Call,
        shards: Sequence[Shard],
        gradients: StagedGradients,
        buffers: Buffers,
        forward: ForwardPass,
        staging: Staging,
        tick: Callable[[], None],
        spans: Spans | None = None,
    ) -> None:
        self._call, self._shards, self._gradients, self._buffers = call, shards, gradients, buffers
        self._forward, self._staging, self._tick, self._spans = forward, staging, tick, spans
        self.weights = [0.0] * len(shards)

    def name(self, place: int) -> str:
        """A shard, for people."""
        return f"shard {self._call.first + self._shards[place].number}"

    def forward(self, block: int, place: int, received: Received | None) -> Left | tuple[Tensor, float]:
        """The forward pass of a block, for one shard.

        Returns:
            what goes on to the next block; from the last one the loss of which the gradient is wanted, and the weight
            of the shard: 0 if it does not count.
        """
        shard, batch = self._shards[place], self._call.shards[place]
        if not shard.samples:  # there is a pass for each shard, so an empty one takes part with another's
            assert self._call.load is not None, "the batch of any shard can be loaded"
            batch = self._call.load(0)
        self._buffers.open(first=False, apart=True)
        try:
            with self._staging.computing(block, received):
                self._forward.compute(self._call, shard, batch)
        except Left as left:
            return left
        except LossError as error:
            if Elsewhere.__name__ in str(error):
                raise LossError(f"the loss depends on {NOT_HANDED_ON}") from error
            raise
        finally:
            if shard.samples:
                self._buffers.take(shard.number)
            self._tick()
        if shard.has_gradients:
            raise LossError(
                "the loss function went backward by itself, which a model in stages on several devices cannot take: "
                "return the loss, and leave backward() out"
            )
        weight, loss = shard.report.weight if shard.samples else 0.0, shard.loss
        assert loss is not None, "the loss function has returned one"
        shard.report.weight, shard.loss = weight, loss.detach()
        return (loss * weight if weight not in (0.0, 1.0) else loss), weight

    @contextmanager
    def backward(self, place: int) -> Iterator[None]:
        """A part of the backward pass of a block, for one shard."""
        begun = perf_counter()
        yield
        if self._spans is not None:
            self._spans.add("backward", begun, perf_counter(), self._shards[place].number)

    def backward_done(self, block: int, place: int, weight: float) -> None:
        """The backward pass of a block is done, for one shard of a weight; there was none without weight."""
        self.weights[place] = weight
        self._gradients.take(block, place)
        self._tick()


class Pipeline:
    """What a model in stages computes otherwise than one that each device has for itself.

    Args:
        prepared: the model.
        staging: its stages.
        devices: the devices of this worker.
        device: the device to compute on.
        spans: the spans of this device, if they are kept.
    """

    def __init__(
        self, prepared: Prepared, staging: Staging, devices: Devices, device: torch.device, spans: Spans | None = None
    ) -> None:
        self._prepared, self._staging, self._devices, self._spans = prepared, staging, devices, spans
        (self._module,) = prepared.modules
        blocks = staging.placement.own
        self._stages = [BlockStage(block, self._module, staging, devices, device) for block in blocks]
        self._schedules: dict[int, Any] = {}

    def gradients(
        self, parameters: Mapping[str, Tensor], reducer: Reducer, fusion: Fusion, norms: SquaredNorms
    ) -> StagedGradients:
        """The gradients of this device's stages."""
        places = range(len(reducer.transport.split.of(reducer.transport.rank)))
        order = places[::-1] if self._staging.placement.schedule == "looped-bfs" else places
        return StagedGradients(parameters, self._staging, order, reducer, fusion, norms)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together, in the order of one device. Collective among the devices."""
        names = {id(parameter): name for name, parameter in self._prepared.parameters.items()}
        used = [each for each in parameters if each.grad is not None]
        norms = torch._foreach_norm([each.grad for each in used if each.grad is not None], 2.0) if used else ()
        told = {names[id(each)]: [float(norm), str(norm.dtype)] for each, norm in zip(used, norms, strict=True)}
        found: dict[str, Any] = {}
        for each in self._devices.gather(told):
            found |= each
        every = [
            torch.tensor(found[name][0], dtype=getattr(torch, str(found[name][1]).removeprefix("torch.")))
            for name, _ in self._module.named_parameters()
            if name in found
        ]
        return torch.linalg.vector_norm(torch.stack(every)) if every else torch.tensor(0.0)

    def compute(
        self,
        call: Call,
        shards: Sequence[Shard],
        gradients: Gradients,
        buffers: Buffers,
        forward: ForwardPass,
        tick: Callable[[], None],
    ) -> list[float]:
        """All passes of an attempt; returns the weights of the shards.

        Args:
            call: what to compute.
            shards: the shards of the worker.
            gradients: what takes the gradients, of :meth:`gradients`.
            buffers: the buffers of this device.
            forward: what calls the loss function.
            tick: a function that is called when this device has got on.

        Raises:
            JobError: the schedule cannot be had with so many shards; says what to do.
            WorkerLost: another device is gone.
        """
        assert isinstance(gradients, StagedGradients), "made here"
        passes = Passes(call, shards, gradients, buffers, forward, self._staging, tick, self._spans)
        for stage in self._stages:
            stage.begin(passes)
        schedule, begun = self._schedule(count := len(shards)), perf_counter()
        try:
            with quiet():
                schedule.step(target=torch.zeros(count), return_outputs=False)
                for stage in self._stages:
                    stage.settle()
        except WorkerLost as error:
            raise type(error)(
                f"device {self._devices.rank} of the worker, which holds {self._title()}: {error}"
            ) from error

        self._write_times(call.step, count, perf_counter() - begun)
        return passes.weights

    def _write_times(self, step: int, shards: int, passes_s: float) -> None:
        if (path := self._staging.times) is not None:
            placement, busy_s = self._staging.placement, sum(stage.busy_s for stage in self._stages)
            about = {"devices": placement.devices, "blocks": len(placement.firsts), "shards": shards}
            descriptor = open_lines(path)
            try:
                append_line(descriptor, {"step": step, **about, "busy_s": busy_s, "passes_s": passes_s})
            finally:
                os.close(descriptor)

    def finish(self, gradients: Gradients) -> None:
        """The weights of all shards are known: their gradients may be reduced."""
        assert isinstance(gradients, StagedGradients), "made here"
        gradients.finish()

    def _title(self) -> str:
        return " and ".join(self._staging.title(block) for block in self._staging.placement.own)

    def _schedule(self, count: int) -> Any:
        if count not in self._schedules:
            placement = self._staging.placement
            held: Any = self._stages if placement.schedule in LOOPED else self._stages[0]
            try:
                made = _SCHEDULES[placement.schedule](held, n_microbatches=count, loss_fn=_as_it_is, scale_grads=False)
            except ValueError as error:
                raise JobError(
                    f"run.pipeline(schedule={placement.schedule!r}): this worker has {count} shards, and its "
                    f"{placement.devices} devices cannot compute them by this schedule ({error}). Take "
                    f"shards= a multiple of workers times devices, fewer devices, or schedule='gpipe', which takes any "
                    f"number"
                ) from error
            self._schedules[count] = made
        return self._schedules[count]


def _as_it_is(loss: Tensor, target: Tensor) -> Tensor:
    """The last block computes the loss itself."""
    return loss
