"""The gradients of several shards, which are added up along the summation tree."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from unisono.adapt.squared_norms import LARGE, squares_of
from unisono.reduce.buckets import Bucket, plan_buckets
from unisono.reduce.partial_sums import PIECE, PartialSumRow, PartialSums, views_of
from unisono.reduce.reducer import Weigh
from unisono.train.step.gradients import GRADIENT, Fusion, GradientChecks, Gradients

_numbers = itertools.count()


class SummedGradients(Gradients):
    """Gradients that are added to partial sums as they arrive in the backward pass.

    A bucket goes to the reducer as soon as the last gradient of the last shard has arrived. Gradients of a small model
    are all taken after the backward pass, because a call for each would take longer than adding it.

    Making an object of this class is collective. For the arguments see :class:`Gradients`.
    """

    def _set_up(self, fusion: Fusion) -> None:
        self._buckets = self._planned(fusion)
        size = sum(parameter.numel() for parameter in self.parameters)
        self._shares_reading = self._norms.one_in == 1 and size > LARGE
        # A transport allocates the buffers of a bucket once for each name, so no other object may use these names.
        self._names_of_buckets = [(next(_numbers), bucket) for bucket in range(len(self._buckets))]
        self._places = {
            entry.index: (bucket, place)
            for bucket, planned in enumerate(self._buckets)
            for place, entry in enumerate(planned.entries)
        }
        self._sums = self._allocated_sums()
        self._own = [
            {entry.index: self.parameters[entry.index] for entry in bucket.entries} for bucket in self._buckets
        ]
        self._missing: list[dict[int, Tensor]] = []  # by bucket: the parameters whose gradients have not arrived yet
        self._sends = False
        self._flats: list[Tensor] = []
        self._wide: dict[int, Tensor] = {}
        self._views: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        lengths, nbytes = [bucket.numel for bucket in self._buckets], sum(tensor.nbytes for tensor in self.parameters)
        self.checks = GradientChecks(lengths, nbytes, self._checked_bytes, tallies=True)
        self._hooks = self._hooked()

    def begin(self, step: int = 0) -> None:
        """Forget the last step; the shards of this worker follow."""
        super().begin(step)
        for sums in self._sums:
            sums.begin()

    def open(self, *, last: bool) -> None:
        """Begin the next shard; see :meth:`Gradients.open`."""
        if self.is_watched:
            self._norms.begin()
        self._sends = last
        self._missing = [*map(dict.copy, self._own)]
        for sums in self._sums:
            sums.open()

    def send(self, weigh: Weigh) -> None:
        """Let buckets go to the reducer, since the weights of all this worker's shards are known."""
        self._reducer.begin(self._names_of_buckets, weigh)

    def serve(self, weigh: Weigh) -> None:
        """Finish the sums of the other workers, on a worker without shards."""
        self.send(weigh)
        for bucket in range(len(self._buckets)):
            self._ready(bucket)

    def close(self) -> None:
        """End the shard: take the gradients that were not taken as they arrived."""
        for bucket, sums in enumerate(self._sums):
            if self._missing[bucket]:
                self._take_rest(bucket)
            sums.close()

    def squared_norm(self) -> float:
        """The squared norm of the last shard's gradient, which includes its weight; 0 if it is not watched."""
        return self._norms.total() if self.is_watched else 0.0

    def mean_squared_norm(self) -> float:
        """The squared norm of the mean gradient. Collective: each worker reads a part of a large one."""
        if not self._shares_reading:
            return super().mean_squared_norm()
        transport = self._reducer.transport
        mean = [*map(GRADIENT, self.trained)]
        squares = transport.all_gather(squares_of(mean, transport.rank, transport.world_size))
        return float(squares.sum(0).sum())

    def totals(self) -> tuple[tuple[Tensor, ...], float]:
        """The sums over all shards of all workers, and the seconds of the reduction; see :meth:`Reducer.totals`."""
        return self._reducer.totals()

    def assign(self, totals: Sequence[Tensor], weight: float, used: Sequence[bool], *, writable: bool) -> None:
        """Make the mean the parameters' gradients; see :meth:`Gradients.assign`."""
        self._flats = [self._mean(number, total, weight, writable) for number, total in enumerate(totals)]
        for number, (flat, total) in enumerate(zip(self._flats, totals, strict=True)):
            if flat is not total:
                self.checks.keep(number, flat)
        self._set(used)

    def release(self, used: Sequence[bool]) -> None:
        """Leave gradients that the script may change, and no statistics. Called after the update."""
        self._flats = [*map(self._reducer.transport.private, self._flats)]
        statistics = len(self.parameters) - len(self.trained)
        self._set([*used[: len(self.trained)], *[False] * statistics])

    def _planned(self, fusion: Fusion) -> tuple[Bucket, ...]:
        return plan_buckets(self.parameters, fusion.bucket_bytes, fusion.compressed)

    def _hooked(self) -> list[torch.utils.hooks.RemovableHandle]:
        if len(self._buckets) == 1 and self._buckets[0].numel <= PIECE:
            self._takes_early = False  # a single bucket cannot go to the reducer before the backward pass is over
            return []
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, number))
            for number, parameter in enumerate(self.parameters)
        ]

    def _allocated_sums(self) -> list[PartialSums]:
        transport = self._reducer.transport
        shards = transport.split.of(transport.rank)
        rows = transport.allocate(self._buckets, max(1, transport.tree.most_kept(shards)))
        return [
            PartialSums(transport.tree.summands(shards), [PartialSumRow.of(bucket, flats[number]) for flats in rows])
            for number, bucket in enumerate(self._buckets)
        ]

    def _arrive(self, number: int, parameter: Tensor) -> None:
        if not self._listens:
            return
        if number not in self._missing[self._places[number][0]]:
            self.came_twice = True
            return
        self._take(number, parameter.grad)
        parameter.grad = None  # frees its memory for the next one

    def _take(self, number: int, gradient: Tensor | None) -> None:
        self._note((number,), (gradient,))
        if self.mark is not None or self.is_watched:
            self._look((number,), (gradient,))
        bucket, place = self._places[number]
        self._sums[bucket].put(place, gradient, self.checks.tallies[bucket])
        del self._missing[bucket][number]
        if self._sends and not self._missing[bucket]:
            self._ready(bucket)

    def _take_rest(self, bucket: int) -> None:
        missing = self._missing[bucket]
        if len(missing) < len(self._own[bucket]) or self._buckets[bucket].numel > PIECE:
            for number, parameter in [*missing.items()]:
                self._take(number, parameter.grad)
            return
        gradients = [*map(GRADIENT, missing.values())]
        self._note(missing, gradients)
        if self.mark is not None or self.is_watched:
            self._look(missing, gradients)
        self._sums[bucket].put_all(gradients, self.checks.tallies[bucket])
        for parameter in missing.values():
            parameter.grad = None
        if self._sends:
            self._ready(bucket)

    def _ready(self, bucket: int) -> None:
        """Give the reducer this worker's sums of a bucket, which are complete."""
        self._reducer.ready(bucket, self._sums[bucket].partials(), self.checks.tallies[bucket])

    def _look(self, numbers: Iterable[int], gradients: Sequence[Tensor | None]) -> None:
        """Show gradients to the digest and to the measurement of norms."""
        for number, gradient in zip(numbers, gradients, strict=True):
            if self.mark is not None:
                self.mark.take(number, gradient)
            if self.is_watched and number < len(self.trained):
                self._norms.take(number, gradient)

    def _mean(self, number: int, total: Tensor, weight: float, writable: bool) -> Tensor:
        dtype = self.parameters[self._buckets[number].entries[0].index].dtype
        if total.dtype != dtype:  # compressed sums: the mean is not rounded again
            if number not in self._wide:
                self._wide[number] = replace(self._buckets[number], dtype=dtype).allocate()
            return self._wide[number].copy_(total).div_(weight)
        if writable and self._reducer.transport.private(total) is not total:
            return self._sums[number].rows[0].flat.copy_(total)
        return total

    def _set(self, used: Sequence[bool]) -> None:
        key = (*map(Tensor.data_ptr, self._flats),)
        if key not in self._views:
            self._views[key] = views_of(self._buckets, self._flats)
        for parameter, view, is_used in zip(self.parameters, self._views[key], used, strict=True):
            parameter.grad = view if is_used else None

    def _summed(self, totals: Sequence[Tensor]) -> Iterable[Tensor]:
        return views_of(self._buckets, totals)

    def _places_of_mean(self) -> Iterable[Tensor | None]:
        return self._flats
