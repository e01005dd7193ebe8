"""The gradients of a model in stages: each device adds up those of its own stages, of all shards of its worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unisono.adapt.squared_norms import SquaredNorms
from unisono.reduce.buckets import Bucket, plan_buckets
from unisono.reduce.partial_sums import PartialSumRow, PartialSums
from unisono.reduce.reducer import Reducer
from unisono.train.model.staging import Staging
from unisono.train.step.gradients import Fusion, Gradients


class StagedGradients(Gradients):
    """The gradients of the stages that this device holds.

    A block's gradients of a shard are there after its backward pass, in whatever order a schedule computes blocks and
    shards; then they are put where that shard belongs in the summation tree. No bucket has those of two blocks.

    Args:
        parameters: the parameters of this device, by name.
        staging: the stages.
        order: a function that returns the places of a block's shards, among those of this worker, in the order of their
            backward passes.
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
        super().__init__(parameters, reducer, fusion, norms)
        self._remaining: dict[int, list[int]] = {}

    def begin(self, step: int = 0) -> None:
        """Forget what was taken before; the shards of this worker follow."""
        super().begin(step)
        self._remaining = {block: list(reversed(self._order)) for block in self._blocks}

    @torch.no_grad()
    def take(self, block: int, place: int, *, counts: bool) -> None:
        """The backward pass of a block is done, for one shard: take its gradients.

        Args:
            block: the block.
            place: the place of the shard, among those of this worker.
            counts: whether they count; those of an empty shard do not.
        """
        if block not in self._remaining:
            return  # nothing in it is trained
        assert self._remaining[block].pop() == place, "shards come in the order of the schedule"
        for number, (bucket, sums, tally) in enumerate(zip(self._buckets, self._sums, self._tallies, strict=True)):
            if self._blocks[number] == block:
                sums.open()
                gradients = list[Tensor | None]()
                for entry in bucket.entries:
                    parameter = self.parameters[entry.index]
                    gradients.append(gradient := parameter.grad if counts else None)
                    self._note(entry.index, gradient)
                    parameter.grad = None
                sums.put_all(gradients, tally)
                sums.close()

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

    def _allocated_sums(self) -> list[PartialSums]:
        transport = self._reducer.transport
        mine = transport.split.of(transport.rank)
        shards = [mine[place] for place in self._order]
        rows = transport.allocate(self._buckets, max(1, transport.tree.most_kept(shards)))
        return [
            PartialSums(transport.tree, shards, [PartialSumRow.of(bucket, flats[number]) for flats in rows])
            for number, bucket in enumerate(self._buckets)
        ]
