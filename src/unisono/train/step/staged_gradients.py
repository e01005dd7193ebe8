"""The gradients of a model in stages: each device adds up those of its own stages, of all shards of its worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unisono.adapt.squared_norms import SquaredNorms
from unisono.plan.tree import Summand, most_kept
from unisono.reduce.buckets import Bucket, plan_buckets
from unisono.reduce.partial_sums import PartialSumRow, PartialSums
from unisono.reduce.reducer import Reducer
from unisono.train.model.staging import Staging
from unisono.train.step.gradients import Fusion, Gradients


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
