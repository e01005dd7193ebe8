"""A model in stages: the devices of a worker compute its shards by the schedules of torch's pipelining."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

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
from unisono.checkpoint.snapshot import Digests, Snapshot
from unisono.checkpoint.tensor_bytes import Share
from unisono.data.generators import generators_kept
from unisono.errors import DataError, JobError, LossError, ModelError, WorkerLost
from unisono.jsonl import append_line, open_lines
from unisono.plan.tree import Summand, most_kept
from unisono.reduce.buckets import Bucket, plan_buckets
from unisono.reduce.partial_sums import PartialSumRow, PartialSums
from unisono.reduce.reducer import Reducer
from unisono.train.group.workers import Workers
from unisono.train.model.elsewhere import NOT_HANDED_ON, Elsewhere
from unisono.train.model.prepared import Prepared
from unisono.train.model.stages import LOOPED
from unisono.train.model.staging import Left, Received, Staging
from unisono.train.state.sliced_state import staged_share, staged_state
from unisono.train.step.gradients import Fusion, Gradients
from unisono.train.step.loss import Shard
from unisono.train.step.part import EngineBase
from unisono.train.step.pipeline_stage import BlockStage, quiet
from unisono.train.step.placement import SpreadPasses, SpreadPlacement
from unisono.train.step.shard_passes import Round, WorkerReport, loaded
from unisono.train.step.stage_messages import StagedEvaluation
from unisono.train.step.step import Call
from unisono.train.step.summed_gradients import SummedGradients
from unisono.train.step.word import Field

R = TypeVar("R")


class StagedGradients(SummedGradients):
    """The gradients of the stages that this device holds.

    A block's gradients of a shard are complete after its backward pass, in whatever order a schedule computes blocks
    and shards. Then they are put into the partial sums at the shard's place in the summation tree. No bucket has
    gradients of two blocks.

    If the summation tree adds the next shard to this one before any other addition, the gradients stay where they are,
    and autograd adds the next ones to them: this is the same addition, without a copy. But autograd would add a
    gradient that arrives in several parts in another order, and a hook of the script would see a sum. In both cases the
    step is computed again, and each shard's gradients are taken by themselves.

    Args:
        norms: a counter, which is not used.
        statistics: the number of statistics; there are none with stages.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        reducer: Reducer,
        fusion: Fusion,
        norms: SquaredNorms,
        statistics: int = 0,
        *,
        staging: Staging,
    ) -> None:
        self._blocks_of = [staging.block_of(name) for name in parameters]
        self._blocks: list[int] = []
        # The places of a block's shards, among those of this worker, in the order of their backward passes.
        places = range(len(reducer.transport.split.of(reducer.transport.rank)))
        self._order = places[::-1] if staging.places.schedule == "looped-bfs" else places
        # Not where each shard's gradient is rounded first, nor where the schedule adds: that knows no shared memory.
        self._adds_up = fusion.compressed is None and staging.places.schedule != "interleaved-zero-bubble"
        super().__init__(parameters, reducer, fusion, norms, statistics)
        self._remaining: dict[int, list[tuple[int, bool]]] = {}
        self._sums_so_far: dict[int, tuple[Tensor, int]] = {}

    def begin(self, step: int = 0) -> None:
        """Forget the last step; the shards of this worker follow."""
        super().begin(step)
        ends = [shard == summand.shards[-1] for summand in self._summands() for shard in summand.shards]
        self._remaining = {block: list(zip(self._order, ends, strict=True))[::-1] for block in self._blocks}
        self._sums_so_far = {}

    def stop_listening(self) -> None:
        """Take each shard's gradients by themselves from now on. Collective."""
        self._adds_up = False
        self._sums = self._allocated_sums()

    @torch.no_grad()
    def take(self, block: int, place: int) -> None:
        """End the backward pass of a block for one shard: take its gradients, or check that they may stay.

        ``place`` is the place of the shard among those of this worker. An empty shard has added nothing.
        """
        if block not in self._remaining:
            return  # the block has no trained parameter
        expected, ends_summand = self._remaining[block].pop()
        assert expected == place, "shards come in the order of the schedule"
        for number, (bucket, sums, tally) in enumerate(
            zip(self._buckets, self._sums, self.checks.tallies, strict=True)
        ):
            if self._blocks[number] == block:
                for entry in bucket.entries:
                    self._see(entry.index, ends_summand=ends_summand)
                if ends_summand:
                    parameters = [self.parameters[entry.index] for entry in bucket.entries]
                    sums.open()
                    sums.put_all([parameter.grad for parameter in parameters], tally)
                    sums.close()
                    for parameter in parameters:
                        parameter.grad = None

    def _see(self, number: int, *, ends_summand: bool) -> None:
        """Check that a parameter's gradient is the result of one addition at most."""
        parameter, before = self.parameters[number], self._sums_so_far.pop(number, None)
        if (gradient := parameter.grad) is None:
            return
        self._note((number,), (gradient,))
        if before is not None:
            self.came_twice |= gradient is not before[0] or gradient._version > before[1] + 1
        if not ends_summand:
            self.came_twice |= bool(parameter._post_accumulate_grad_hooks) or gradient.dtype != parameter.dtype
            self._sums_so_far[number] = gradient, gradient._version

    def finish(self) -> None:
        """Let all buckets be reduced, since all shards are done and their weights are known."""
        for number, (sums, tally) in enumerate(zip(self._sums, self.checks.tallies, strict=True)):
            self._reducer.ready(number, sums.partials(), tally)

    def _planned(self, fusion: Fusion) -> tuple[Bucket, ...]:
        buckets: list[Bucket] = []
        for block in sorted(set(self._blocks_of), reverse=True):
            numbers = [number for number, owner in enumerate(self._blocks_of) if owner == block]
            parameters = [self.parameters[number] for number in numbers]
            for bucket in plan_buckets(parameters, fusion.bucket_bytes, fusion.compressed):
                entries = tuple(replace(entry, index=numbers[entry.index]) for entry in bucket.entries)
                buckets.append(replace(bucket, entries=entries))
                self._blocks.append(block)
        return tuple(buckets)

    def _hooked(self) -> list[torch.utils.hooks.RemovableHandle]:
        return []  # some schedules compute gradients of weights without calling hooks

    def _summands(self) -> Sequence[Summand]:
        transport = self._reducer.transport
        own_shards = transport.split.of(transport.rank)
        shards = [own_shards[place] for place in self._order]
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


class StagedPasses(SpreadPasses):
    """Passes in which the devices of a worker compute all its shards together, in stages."""

    def __init__(self, base: EngineBase, rounds_of: Callable[[range], Sequence[Round]], staging: Staging) -> None:
        super().__init__(base, rounds_of)
        self._staging = staging
        (module,) = base.prepared.modules
        arguments = module, staging, self._devices, base.device
        self._stages = [BlockStage(block, *arguments) for block in staging.places.own]
        self._schedules: dict[int, Any] = {}

    def of_worker(self, fields: Sequence[Field], report: WorkerReport) -> WorkerReport:
        """The values and reports of all devices; flags are this device's own, since each device has other tensors."""
        values, reports, used = report
        return *super().of_worker(fields, (values, reports, ()))[:2], used

    def compute(self, call: Call, gradients: Gradients, audited: Collection[int]) -> list[Shard]:
        """Compute all shards of this worker in a call, and send their gradients to the reducer.

        Raises:
            JobError: the schedule is not possible with so many shards; says what to do.
            WorkerLost: another device is lost.
        """
        assert isinstance(gradients, StagedGradients), "made here"
        shards = [Shard.of(call, turn.own, is_audited=turn.own in audited, counts=turn.counts) for turn in self.rounds]
        self._call, self._gradients, self._shards, self._of_shards = call, gradients, shards, [0.0] * len(shards)
        self._prepared.clear_gradients()
        try:
            with generators_kept():
                self._compute_stages()
        except (LossError, ModelError) as error:
            raise self._placed(error, call, None) from error
        gradients.send(partial(self._weigh, call, self._of_shards))
        gradients.finish()
        return shards

    def name(self, place: int) -> str:
        """The name of a shard, for messages."""
        return f"shard {self._call.first + self._shards[place].number}"

    def forward(self, block: int, place: int, received: Received | None) -> Left | tuple[Tensor, float]:
        """The forward pass of a block, for one shard.

        Returns:
            what goes on to the next block; from the last block, the loss from which the backward pass begins, and the
                weight of the shard: 0 if it does not count.
        """
        shard, batch = self._shards[place], self._call.shards[place]
        if not shard.samples:  # the schedule makes a pass for each shard, so an empty one uses another shard's batch
            batch = loaded(self._call)
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
            self._workers.tick()
        if shard.has_gradients:
            raise LossError(
                "the loss function called backward() itself, which a model in stages on several devices cannot take: "
                "return the loss, and leave backward() out"
            )
        weight, loss = shard.report.weight if shard.samples else 0.0, shard.loss
        assert loss is not None, "the loss function has returned one"
        shard.report.weight, shard.loss = weight, loss.detach()
        return (loss * weight if weight not in (0.0, 1.0) else loss), weight

    @contextmanager
    def backward(self, place: int) -> Iterator[None]:
        """Measure a part of the backward pass of a block, for one shard, which runs within the context."""
        begun = perf_counter()
        yield
        if self._spans is not None:
            self._spans.add("backward", begun, perf_counter(), self._shards[place].number)

    def backward_done(self, block: int, place: int, weight: float) -> None:
        """End the backward pass of a block for one shard; a shard without weight has had none."""
        self._of_shards[place] = weight
        self._gradients.take(block, place)
        self._workers.tick()

    def _compute_stages(self) -> None:
        for stage in self._stages:
            stage.begin(self)
        schedule, begun = self._schedule(count := len(self._shards)), perf_counter()
        try:
            with quiet():
                schedule.step(target=torch.zeros(count), return_outputs=False)
                for stage in self._stages:
                    stage.settle()
        except WorkerLost as error:
            held = " and ".join(map(self._staging.title, self._staging.places.own))
            raise type(error)(f"device {self._devices.rank} of the worker, which holds {held}: {error}") from error
        self._write_times(self._call.step, count, perf_counter() - begun)

    def _write_times(self, step: int, shards: int, passes_s: float) -> None:
        if (path := self._staging.times) is not None:
            places, busy_s = self._staging.places, sum(stage.busy_s for stage in self._stages)
            sizes = {"devices": places.devices, "blocks": len(places.firsts), "shards": shards}
            descriptor = open_lines(path)
            try:
                append_line(descriptor, {"step": step, **sizes, "busy_s": busy_s, "passes_s": passes_s})
            finally:
                os.close(descriptor)

    def _schedule(self, count: int) -> Any:
        if count not in self._schedules:
            places = self._staging.places
            held: Any = self._stages if places.schedule in LOOPED else self._stages[0]
            try:
                schedule = _SCHEDULES[places.schedule](held, n_microbatches=count, loss_fn=_as_it_is, scale_grads=False)
            except ValueError as error:
                raise JobError(
                    f"run.pipeline(schedule={places.schedule!r}): this worker has {count} shards, and its "
                    f"{places.devices} devices cannot compute them by this schedule ({error}). Take "
                    f"shards= a multiple of workers times devices, fewer devices, or schedule='gpipe', which takes any "
                    f"number"
                ) from error
            self._schedules[count] = schedule
        return self._schedules[count]


def _as_it_is(loss: Tensor, target: Tensor) -> Tensor:
    """Return the loss, which the last block has computed itself."""
    return loss


class Pipeline(SpreadPlacement):
    """A model in stages, each of which lies whole on one device of each worker."""

    def __init__(self, prepared: Prepared, workers: Workers, staging: Staging) -> None:
        super().__init__(prepared, workers)
        self._staging = staging
        self._evaluation = StagedEvaluation(staging, workers.devices, workers.device)

    def require(self, state: Mapping[str, Any] | None) -> None:
        """Refuse further state, which belongs to no stage."""
        if state:
            raise ModelError(
                "run.prepare(state=…): a model in stages has no further state yet: leave it out, or keep it in buffers"
            )

    def require_functions(self, names: Sequence[str]) -> None:
        """Refuse several functions: all devices take part in one forward pass."""
        if len(names) > 1:
            raise DataError(
                f"run.evaluate was given the functions {', '.join(names)}, and each would call the model, which lies "
                f"in stages: give one function that calls the model once and returns a dict of all metrics"
            )

    @property
    def gradients(self) -> Callable[..., Gradients]:
        """The class of gradients for this device's stages."""
        return partial(StagedGradients, staging=self._staging)

    def passes(self, base: EngineBase) -> StagedPasses:
        """The object that makes the passes of all shards together, in stages."""
        return StagedPasses(base, self.rounds, self._staging)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients. Norms of parameters are gathered, and combined in the order of a single device."""
        names = {id(parameter): name for name, parameter in self._prepared.parameters.items()}
        used = [tensor for tensor in parameters if tensor.grad is not None]
        norms = torch._foreach_norm([tensor.grad for tensor in used if tensor.grad is not None], 2.0) if used else ()
        own_norms = {
            names[id(tensor)]: [float(norm), str(norm.dtype)] for tensor, norm in zip(used, norms, strict=True)
        }
        all_norms: dict[str, Any] = {}
        for device_norms in self._devices.gather(own_norms):
            all_norms |= device_norms
        in_order = [
            torch.tensor(all_norms[name][0], dtype=getattr(torch, str(all_norms[name][1]).removeprefix("torch.")))
            for name, _ in self._prepared.modules[0].named_parameters()
            if name in all_norms
        ]
        return torch.linalg.vector_norm(torch.stack(in_order)) if in_order else torch.tensor(0.0)

    def evaluate(self, act: Callable[[], R]) -> R | None:
        """The result of a function that calls the model, on the device with the last stage; None on others."""
        return self._evaluation(act)

    def evaluated(self, results: list[Any]) -> list[Any]:
        """The results of the device with the last stage, on all devices."""
        return self._evaluation.shared(results)

    def give(self, snapshot: Snapshot, verified: Digests | None) -> tuple[Snapshot, Digests | None, Share]:
        """The contents of a checkpoint: each device writes its stages."""
        return staged_share(self._staging, self._prepared, snapshot, self._devices)

    def take(self, snapshot: Snapshot) -> Snapshot:
        """This device's stages of a whole snapshot."""
        return staged_state(self._staging, self._prepared, snapshot)

    def _rounds(self, shards: range) -> Sequence[Round]:
        last, rank = self._staging.places.last, self._devices.rank
        return [Round(range(shard, shard + 1), range(last, last + 1), shard, rank == last) for shard in shards]
