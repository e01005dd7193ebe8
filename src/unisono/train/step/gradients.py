"""The gradients of a step: from each shard's to their mean in ``parameter.grad``."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from unisono.adapt.squared_norms import LARGE, SquaredNorms, squares_of
from unisono.errors import ModelError
from unisono.finite import LONG, Finiteness, first_not_finite
from unisono.plan.audits import windows
from unisono.reduce.buckets import Bucket, plan_buckets
from unisono.reduce.partial_sums import PartialSumRow, PartialSums, views_of
from unisono.reduce.reducer import Reducer, Weigh
from unisono.reduce.tally import Tally, Witness
from unisono.train.step.audit import ShardDigest, in_memory_order
from unisono.words import Words

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Fusion:
    """The settings by which gradients are put together for the reduction.

    Attributes:
        bucket_bytes: the size of a bucket.
        compressed: the dtype of wider gradients in the summation tree; None leaves them alone.
        checked_bytes: the number of bytes of gradients whose memory is checked in a step; None for all.
    """

    bucket_bytes: int
    compressed: torch.dtype | None
    checked_bytes: int | None = 0


class Gradients:
    """The gradients of the parameters that one call of ``step.run`` updates.

    Each is taken into the partial sums as it arrives in the backward pass; a bucket whose last gradient of the last
    shard has arrived goes to the reducer at once. With a single shard the gradients stay where autograd put them:
    there is nothing to add.

    Args:
        parameters: the parameters by name.
        reducer: the reducer that adds up all workers' gradients. Making an object of this class is collective.
        fusion: the settings of the buckets.
        norms: a counter that takes each shard's gradient while :attr:`is_watched`.
        statistics: the number of statistics, the last of the parameters: added up alike, but part of no norm.

    Attributes:
        names: the names of all that is added up.
        parameters: the tensors, likewise.
        trained: those without the statistics.
        used: a flag for each parameter: whether any shard taken so far gave it a gradient.
        is_watched: whether somebody wants to know each shard's squared norm.
        witness: a function that gets what was written to checked memory, to inject a fault.
        mark: a digest that takes the gradients of the shard under way, if that is audited.
        leaves_single: whether gradients of a single shard stay where they are.
    """

    leaves_single = True

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        reducer: Reducer,
        fusion: Fusion,
        norms: SquaredNorms,
        statistics: int = 0,
    ) -> None:
        self.names = tuple(parameters)
        self.parameters: Sequence[Tensor] = tuple(parameters.values())
        self.trained = self.parameters[: len(self.parameters) - statistics]
        self.came_twice = self.is_watched = False
        self.witness: Witness | None = None
        self.mark: ShardDigest | None = None
        self._norms = norms
        self._reducer = reducer
        self._single = self.leaves_single and reducer.transport.tree.shards == 1
        self._buckets: tuple[Bucket, ...] = () if self._single else self._planned(fusion)
        size = sum(parameter.numel() for parameter in self.parameters)
        self._shares_reading = norms.one_in == 1 and size > LARGE and not self._single
        self._names_of_buckets = [(next(_numbers), bucket) for bucket in range(len(self._buckets))]
        self._places = {
            entry.index: (bucket, place)
            for bucket, one in enumerate(self._buckets)
            for place, entry in enumerate(one.entries)
        }
        self._sums = self._allocated_sums()
        self.used = [False] * len(self.parameters)
        self._arrived: list[bool] = []
        self._missing: list[int] = []
        self._sends = self._listens = False
        self._hears = True
        self._flats: list[Tensor] = []
        self._wide: dict[int, Tensor] = {}
        self._views: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        self._finished = Finiteness()  # what stays where it is
        self._windows: Sequence[range] = ()  # what is checked of each buffer
        self._tallies: list[Tally | None] = []
        self._seen: dict[
            int, tuple[int, int]
        ] = {}  # which gradients have arrived, and how often each was written by then
        self._kept: dict[int, tuple[Words, int]] = {}  # what took the place of a buffer that is tallied
        is_tallied = reducer.tallies and all(one.device.type == "cpu" for one in self.parameters)
        self._checked_bytes = fusion.checked_bytes if is_tallied else 0
        self._bytes = sum(one.nbytes for one in self.parameters)
        self._lengths = [bucket.numel for bucket in self._buckets] or [one.numel() for one in self.parameters]
        self._hooks = self._hooked()

    def begin(self, step: int = 0) -> None:
        """Forget what was taken before; the shards of this worker follow."""
        self.used = [False] * len(self.parameters)
        self.came_twice = False
        self._open(step)
        for sums in self._sums:
            sums.begin()

    def open(self, *, last: bool) -> None:
        """The next shard begins.

        Args:
            last: whether it is this worker's last one; what it leaves is reduced. :meth:`send` comes before its
                backward pass.
        """
        if self._single:
            return
        if self.is_watched:
            self._norms.begin()
        self._sends = last
        self._arrived = [False] * len(self.parameters)
        self._missing = [len(bucket.entries) for bucket in self._buckets]
        for sums in self._sums:
            sums.open()

    def computed(self) -> None:
        """The forward pass of the shard is done."""

    def leave_out(self) -> None:
        """What comes of the passes under way does not count: the shard is empty, or another device computes it."""

    def send(self, weigh: Weigh) -> None:
        """The weights of all this worker's shards are known: buckets may go to the reducer."""
        if not self._single:
            self._reducer.begin(self._names_of_buckets, weigh)

    def serve(self, weigh: Weigh) -> None:
        """There are no shards here: the sums of the others are finished."""
        self.send(weigh)
        for bucket in range(len(self._buckets)):
            self._reducer.ready(bucket, self._sums[bucket].partials(), self._tallies[bucket])

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take gradients as they arrive in the backward pass that runs in here."""
        self._listens = self._hears
        try:
            yield
        finally:
            self._listens = False

    def stop_listening(self) -> None:
        """From now on take gradients after each backward pass: in this model one arrives in several parts."""
        self._hears = False

    @torch.no_grad()
    def close(self) -> None:
        """The shard is done: take what did not arrive by itself.

        Raises:
            ModelError: a gradient is sparse; names the parameter.
        """
        for number, parameter in enumerate(self.parameters):
            if self._single:
                gradient = parameter.grad
                self._note(number, gradient)
                if self.mark is not None:
                    self.mark.take(number, gradient)
                is_new = gradient is not None and self._seen.get(number) != (id(gradient), gradient._version)
                if is_new:
                    self._keep(number, gradient)  # a hook of the script has changed it since
                if gradient is not None and (is_new or gradient.numel() < LONG):
                    self._finished.look(gradient, number)
            elif not self._arrived[number]:
                self._take(number, parameter.grad)
        for sums in self._sums:
            sums.close()

    def watch(self, step: int | None) -> None:
        """Have the shards' squared norms taken from now on, of blocks that the step's number chooses; or not (None)."""
        self.is_watched = step is not None
        self._norms.offset = step or 0

    def squared_norm(self) -> float:
        """Of the shard that was computed last, times its weight; 0 if nobody watches."""
        return self._norms.total() if self.is_watched and not self._single else 0.0

    def mean_squared_norm(self) -> float:
        """Of the mean gradient, which was assigned. Collective: where all of a large one is read, each reads a part."""
        mean = [parameter.grad for parameter in self.trained]
        if self._shares_reading:
            transport = self._reducer.transport
            squares = transport.all_gather(squares_of(mean, transport.rank, transport.world_size))
            return float(squares.sum(0).sum())
        self._norms.begin()
        for number, gradient in enumerate(mean):
            self._norms.take(number, gradient)
        return self._norms.total()

    def totals(self) -> tuple[tuple[Tensor, ...], float]:
        """The sum over all shards of all workers, as soon as it is there; see :meth:`Reducer.totals`."""
        return ((), 0.0) if self._single else self._reducer.totals()

    @property
    def balance(self) -> int:
        """Of all tallies of this worker, now that there are totals."""
        return 0 if self._single else sum(tally.balance for tally in self._tallies if tally is not None)

    @property
    def copies(self) -> int:
        """Likewise."""
        return sum(tally.copies for tally in self._tallies if tally is not None)

    def are_finite(self) -> Callable[[], bool]:
        """Ask whether all sums that this worker has finished are, now that there are totals."""
        return self._finished.asked(tally.finished for tally in self._tallies if tally is not None)

    def not_finite(self, totals: Sequence[Tensor] | None) -> tuple[int, float] | None:
        """The first parameter whose gradient holds a value that is NaN or infinite: its number, and such a value.

        Args:
            totals: the sums that :meth:`totals` returned; None to look at what lies in ``parameter.grad``.
        """
        own = [parameter.grad for parameter in self.parameters]
        for number, gradient in enumerate(views_of(self._buckets, totals) if totals else own):
            if gradient is not None and (value := first_not_finite(gradient)) is not None:
                return number, value
        return None

    def has_kept(self) -> bool:
        """Whether the step's gradient, as far as its memory is checked, still is what was reduced."""
        for words, left in self._kept.values():  # in each step: a generator would take twice as long
            if words.sum() != left:
                return False
        return all(tally.has_kept() for tally in self._tallies if tally is not None)

    def show(self) -> None:
        """Let the witness see the step's gradient."""
        for words, _ in self._kept.values() if self.witness is not None else ():
            assert self.witness is not None
            self.witness("gradient", words.values)
        for tally in self._tallies:
            if tally is not None:
                tally.show()

    def unscale(self, scale: float) -> None:
        """Divide gradients of a single shard, which nobody has added up, and so nobody has divided."""
        present = [each.grad for each in self.trained if each.grad is not None]
        if self._single and scale != 1.0 and present:
            torch._foreach_div_(present, scale)
            self.keep()

    def keep(self) -> None:
        """The step's gradient was changed, and stays from now on as it is."""
        for number in range(len(self._windows)):
            self._keep(number, self.parameters[number].grad if self._single else self._flats[number])

    def assign(self, totals: Sequence[Tensor], weight: float, used: Sequence[bool], *, writable: bool) -> None:
        """Make the mean the parameters' gradients; absent where no shard used one.

        Args:
            totals: the sums that :meth:`totals` returned.
            weight: the weight of all shards together.
            used: one flag per parameter: whether any shard of any worker gave it a gradient.
            writable: whether somebody changes them in place afterwards.
        """
        self._flats = [self._mean(number, total, weight, writable) for number, total in enumerate(totals)]
        for number, (flat, total) in enumerate(zip(self._flats, totals, strict=True)):
            if flat is not total:
                self._keep(number, flat)
        self._set(used)

    def release(self, used: Sequence[bool]) -> None:
        """The update is done: leave gradients that whoever looks at them may change, and no statistics."""
        self._flats = [self._reducer.transport.private(flat) for flat in self._flats]
        statistics = len(self.parameters) - len(self.trained)
        self._set([*used[: len(self.trained)], *[False] * statistics])

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _planned(self, fusion: Fusion) -> tuple[Bucket, ...]:
        return plan_buckets(self.parameters, fusion.bucket_bytes, fusion.compressed)

    def _hooked(self) -> "list[torch.utils.hooks.RemovableHandle]":
        arrives = self._stay if self._single else self._arrive
        return [
            parameter.register_post_accumulate_grad_hook(partial(arrives, number))
            for number, parameter in enumerate(self.parameters)
        ]

    def _open(self, step: int) -> None:
        """Nothing is tallied, and nothing kept."""
        self._windows = windows(self._lengths, self._bytes, self._checked_bytes, step)
        self._kept, self._seen = {}, {}
        self._finished.forget()
        if not self._single:
            self._tallies = [Tally(part.start, part.stop, self.witness) for part in self._windows]

    def _keep(self, number: int, values: Tensor | None) -> None:
        """From now on these are kept, and not what was kept before in their place."""
        part = self._windows[number]
        if part and values is not None and not values.is_sparse:
            kept = values if values.is_contiguous() else in_memory_order(values)
            words = Words(kept if len(part) == kept.numel() else kept.view(-1)[part.start : part.stop])
            self._kept[number] = words, words.sum()
            if not self._single:
                self._tallies[number] = None

    def _stay(self, number: int, parameter: Tensor) -> None:
        if self._listens and (gradient := parameter.grad) is not None:
            self._keep(number, gradient)  # what came before is part of it
            if gradient.numel() >= LONG:
                self._finished.look(gradient, number)
            self._seen[number] = id(gradient), gradient._version

    @torch.no_grad()
    def _arrive(self, number: int, parameter: Tensor) -> None:
        if not self._listens:
            return
        if self._arrived[number]:
            self.came_twice = True
            return
        self._take(number, parameter.grad)
        parameter.grad = None  # its memory serves the next one

    def _take(self, number: int, gradient: Tensor | None) -> None:
        self._note(number, gradient)
        self._marked(number, gradient)
        if self.is_watched and number < len(self.trained):
            self._norms.take(number, gradient)
        self._arrived[number] = True
        bucket, place = self._places[number]
        self._sums[bucket].put(place, gradient, self._tallies[bucket])
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0 and self._sends:
            self._reducer.ready(bucket, self._sums[bucket].partials(), self._tallies[bucket])

    def _marked(self, number: int, gradient: Tensor | None) -> None:
        if self.mark is not None:
            self.mark.take(number, gradient)

    def _note(self, number: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        self.used[number] = True
        if gradient.is_sparse:
            raise ModelError(
                f"the gradient of {self.names[number]} is sparse, which has no exact sum here: use "
                f"nn.Embedding(sparse=False)"
            )

    def _mean(self, number: int, total: Tensor, weight: float, writable: bool) -> Tensor:
        if total.dtype != (wide := self._dtype(number)):  # compressed: the mean is not rounded
            if number not in self._wide:
                self._wide[number] = replace(self._buckets[number], dtype=wide).allocate()
            return self._wide[number].copy_(total).div_(weight)
        if writable and self._reducer.transport.private(total) is not total:
            return self._sums[number].rows[0].flat.copy_(total)
        return total

    def _dtype(self, bucket: int) -> torch.dtype:
        return self.parameters[self._buckets[bucket].entries[0].index].dtype

    def _set(self, used: Sequence[bool]) -> None:
        if self._single:
            return
        key = tuple(flat.data_ptr() for flat in self._flats)
        if key not in self._views:
            self._views[key] = views_of(self._buckets, self._flats)
        for parameter, view, is_used in zip(self.parameters, self._views[key], used, strict=True):
            parameter.grad = view if is_used else None

    def _allocated_sums(self) -> list[PartialSums]:
        """For each bucket."""
        transport = self._reducer.transport
        mine = transport.split.of(transport.rank)
        count = max(1, transport.tree.most_kept(mine))
        rows = [] if self._single else transport.allocate(self._buckets, count)
        return [
            PartialSums(transport.tree.summands(mine), [PartialSumRow.of(bucket, flats[number]) for flats in rows])
            for number, bucket in enumerate(self._buckets)
        ]
