"""The gradients of a step: from each shard's to their mean in ``parameter.grad``, and what is checked of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from unisono.adapt.squared_norms import SquaredNorms
from unisono.errors import ModelError
from unisono.reduce.partial_sums import UNTALLIED, Tally, Witness, windows
from unisono.reduce.reducer import Reducer, Weigh
from unisono.train.step.word import ShardReport
from unisono.words import LONG, MODULUS, Finiteness, Words, first_not_finite, is_dense, sum_of_words

_NOTHING = nullcontext()

GRADIENT = attrgetter("grad")


# Digests of the results of a shard, by which workers compare them bit for bit.

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplying by it modulo 2**64 loses no bit


class ShardDigest:
    """A digest of all results of a shard: its gradient, its loss and metrics, and its buffers."""

    def __init__(self) -> None:
        self._sum = 0

    def take(self, number: int, gradient: Tensor | None) -> None:
        """Add a parameter's gradient. The order of calls does not matter."""
        words = 0 if gradient is None else 1 + sum_of_words(_in_memory_order(gradient))
        self._sum = (self._sum + _FACTOR * (2 * number + 1) * words) % MODULUS

    def finish(self, report: ShardReport, buffers: Sequence[Tensor | None]) -> str:
        """The digest, in hex, once all gradients are added."""
        buffer_sums = [None if buffer is None else sum_of_words(_in_memory_order(buffer)) for buffer in buffers]
        numbers = [report.loss, report.weight, *(report.metrics[name] for name in sorted(report.metrics))]
        results = [self._sum, buffer_sums, [float(number).hex() for number in numbers]]
        return hashlib.blake2b(repr(results).encode(), digest_size=8).hexdigest()


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A tensor's elements in the order in which they lie in memory, if there are no gaps; else in their own order."""
    if is_dense(tensor):
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    return tensor.detach().reshape(-1)


# Checks that memory has kept a step's gradients, and that they are finite.

_BALANCE, _COPIES, _FINISHED = map(attrgetter, ("balance", "copies", "finished"))


class GradientChecks:
    """Checks that memory has kept the gradients that were written to it, and that all of them are finite.

    Args:
        lengths: the number of elements of each buffer: of each bucket, or of each gradient that stays where it is.
        size: the bytes of all buffers together.
        checked_bytes: the bytes whose memory is checked in a step; None for all.
        tallies: whether the buffers are buckets, to which partial sums are written.

    Attributes:
        witness: a function that gets what was written to checked memory, to inject a fault.
        tallies: the tally of each bucket; ``UNTALLIED`` once other memory has taken the bucket's place.
    """

    def __init__(self, lengths: Sequence[int], size: int, checked_bytes: int | None, *, tallies: bool) -> None:
        self.witness: Witness | None = None
        self.tallies: list[Tally] = []
        self._lengths, self._size, self._checked_bytes, self._has_tallies = lengths, size, checked_bytes, tallies
        self._windows: Sequence[range] = ()  # the elements of each buffer that are checked
        self._kept: dict[int, tuple[Words, int]] = {}  # by buffer: the memory in its place, and the sum of its words
        self._stays = Finiteness()

    def begin(self, step: int) -> None:
        """Forget the last step, and choose the memory to check in this one."""
        self._windows = windows(self._lengths, self._size, self._checked_bytes, step)
        self._kept = {}
        self._stays.forget()
        if self._has_tallies:
            self.tallies = [Tally(part.start, part.stop, self.witness) for part in self._windows]

    def keep(self, number: int, values: Tensor | None) -> None:
        """Check from now on that values stay as they are in the place of a buffer."""
        part = self._windows[number]
        if part and values is not None and not values.is_sparse:
            flat = values if values.is_contiguous() else _in_memory_order(values)
            words = Words(flat if len(part) == flat.numel() else flat.view(-1)[part.start : part.stop])
            self._kept[number] = words, words.sum()
            if self.tallies:
                self.tallies[number] = UNTALLIED

    def arrived(self, number: int, gradient: Tensor) -> None:
        """Note a gradient that was just written, and stays where it is."""
        self.keep(number, gradient)
        if gradient.numel() >= LONG:  # shorter ones are checked together after the backward pass
            self._stays.look(gradient, number)

    def stays(self, number: int, gradient: Tensor, *, is_new: bool) -> None:
        """Note a gradient after the backward pass; it is new if :meth:`arrived` was not called with it."""
        if is_new:
            self.keep(number, gradient)
        if is_new or gradient.numel() < LONG:
            self._stays.look(gradient, number)

    @property
    def balance(self) -> int:
        """The words that this worker has written less those that it has read; see :class:`Tally`."""
        return sum(map(_BALANCE, self.tallies))

    @property
    def copies(self) -> int:
        """The difference of words written and words read, of memory that is copied to every worker."""
        return sum(map(_COPIES, self.tallies))

    def are_finite(self) -> Callable[[], bool]:
        """Ask whether everything that this worker has finished is finite. What is returned waits for the answer."""
        return self._stays.start_check(map(_FINISHED, self.tallies))

    def has_kept(self) -> bool:
        """Whether the checked memory still holds the step's gradient as it was reduced."""
        for words, left in self._kept.values():  # runs in each step: a generator would take twice as long
            if words.sum() != left:
                return False
        return all(map(Tally.has_kept, self.tallies))

    def show(self) -> None:
        """Show the step's gradient to the witness."""
        if self.witness is not None:
            for words, _ in self._kept.values():
                self.witness("gradient", words.values)
            for tally in self.tallies:
                tally.show()


# From each shard's gradients to their mean.


@dataclass(frozen=True, slots=True)
class Fusion:
    """The settings by which gradients are joined to buckets.

    Attributes:
        compressed: the dtype to which wider gradients are rounded in the summation tree; None leaves them alone.
        checked_bytes: the number of bytes of gradients whose memory is checked in a step; None for all.
    """

    bucket_bytes: int
    compressed: torch.dtype | None
    checked_bytes: int | None = 0


class Gradients:
    """The gradients of the parameters that one call of ``step.run`` updates.

    Args:
        norms: a counter that takes each shard's gradient while :attr:`is_watched`.
        statistics: the number of statistics, which are the last of the parameters: added up alike, but not part of any
            norm.

    Attributes:
        trained: the parameters without the statistics.
        used: a flag for each parameter: whether any shard taken so far gave it a gradient.
        came_twice: whether a gradient has arrived in several parts, so that this attempt does not count.
        is_watched: whether each shard's squared norm is measured.
        mark: a digest of the gradients of the shard under way, if that is audited.
    """

    checks: GradientChecks

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
        self.used = [False] * len(self.parameters)
        self.came_twice = self.is_watched = self._listens = False
        self.mark: ShardDigest | None = None
        self._reducer, self._norms = reducer, norms
        self._takes_early = True
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        is_checked = reducer.tallies and all(parameter.device.type == "cpu" for parameter in self.parameters)
        self._checked_bytes = fusion.checked_bytes if is_checked else 0
        self._set_up(fusion)

    def _set_up(self, fusion: Fusion) -> None:
        """Make the checks, the hooks, and what gradients are put into."""
        raise NotImplementedError

    def begin(self, step: int = 0) -> None:
        """Forget the last step; the shards of this worker follow."""
        self.used = [False] * len(self.parameters)
        self.came_twice = False
        self.checks.begin(step)

    def open(self, *, last: bool) -> None:
        """Begin the next shard.

        Args:
            last: whether it is this worker's last one, after which buckets are reduced. :meth:`send` is called before
                its backward pass.
        """

    def computed(self) -> None:
        """Note that the forward pass of the shard is done."""

    def leave_out(self) -> None:
        """Ignore the gradients of the passes under way: the shard is empty, or another device computes it."""

    def send(self, weigh: Weigh) -> None:
        """Let buckets go to the reducer, since the weights of all this worker's shards are known."""

    def serve(self, weigh: Weigh) -> None:
        """Finish the sums of the other workers, on a worker without shards."""

    def listening(self) -> AbstractContextManager[None]:
        """Take gradients as they arrive in the backward pass that runs within the context."""
        return self._taking() if self._takes_early else _NOTHING

    @contextmanager
    def _taking(self) -> Iterator[None]:
        self._listens = True
        try:
            yield
        finally:
            self._listens = False

    def stop_listening(self) -> None:
        """Take gradients after each backward pass from now on, since one arrives in several parts in this model."""
        self._takes_early = False

    def close(self) -> None:
        """End the shard: take the gradients that were not taken as they arrived.

        Raises:
            ModelError: a gradient is sparse; names the parameter.
        """
        raise NotImplementedError

    def watch(self, step: int | None) -> None:
        """Measure the shards' squared norms from now on, or not.

        ``step`` chooses the blocks that are measured; None for no measurement.
        """
        self.is_watched = step is not None
        self._norms.offset = step or 0

    def squared_norm(self) -> float:
        """The squared norm of the last shard's gradient, which includes its weight; 0 if it is not watched."""
        return 0.0

    def mean_squared_norm(self) -> float:
        """The squared norm of the mean gradient, after :meth:`assign`. Collective."""
        self._norms.begin()
        for number, parameter in enumerate(self.trained):
            self._norms.take(number, parameter.grad)
        return self._norms.total()

    def totals(self) -> tuple[tuple[Tensor, ...], float]:
        """The sums over all shards of all workers, and the seconds of the reduction; see :meth:`Reducer.totals`."""
        return (), 0.0

    def not_finite(self, totals: Sequence[Tensor]) -> tuple[int, float] | None:
        """The number of the first parameter whose gradient has a value that is NaN or infinite, and such a value.

        Without the totals, this looks at ``parameter.grad``.
        """
        for number, gradient in enumerate(self._summed(totals) if totals else map(GRADIENT, self.parameters)):
            if gradient is not None and (value := first_not_finite(gradient)) is not None:
                return number, value
        return None

    def unscale(self, scale: float) -> None:
        """Divide gradients by the loss scale, if they are not sums, which are divided by it anyway."""

    def keep(self) -> None:
        """Check the step's gradient as it is now from here on, since it was changed."""
        for number, gradient in enumerate(self._places_of_mean()):
            self.checks.keep(number, gradient)

    def assign(self, totals: Sequence[Tensor], weight: float, used: Sequence[bool], *, writable: bool) -> None:
        """Make the mean the parameters' gradients; None where no shard used a parameter.

        ``weight`` is that of all shards together. ``used`` says of each parameter whether any shard of any worker gave
        it a gradient, ``writable`` whether gradients are changed in place afterwards.
        """

    def release(self, used: Sequence[bool]) -> None:
        """Leave gradients that the script may change, and no statistics. Called after the update."""

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _summed(self, totals: Sequence[Tensor]) -> Iterable[Tensor]:
        """The sum of each parameter's gradient, as views of the totals."""
        raise NotImplementedError

    def _places_of_mean(self) -> Iterable[Tensor | None]:
        """The memory of the mean gradient, for each buffer that is checked."""
        raise NotImplementedError

    def _note(self, numbers: Iterable[int], gradients: Sequence[Tensor | None]) -> None:
        """Note which parameters have a gradient, and refuse sparse ones."""
        for number, gradient in zip(numbers, gradients, strict=True):
            self.used[number] |= gradient is not None
            if gradient is not None and gradient.is_sparse:
                raise ModelError(
                    f"the gradient of {self.names[number]} is sparse, which has no exact sum here: use "
                    f"nn.Embedding(sparse=False)"
                )


class GradientsInPlace(Gradients):
    """The gradients of a single shard, which stay where autograd puts them, since nothing has to be added.

    Statistics stay there, too. The shard's norm is that of the mean.
    """

    def _set_up(self, fusion: Fusion) -> None:
        lengths, size = [tensor.numel() for tensor in self.parameters], sum(tensor.nbytes for tensor in self.parameters)
        self.checks = GradientChecks(lengths, size, self._checked_bytes, tallies=False)
        self._seen: dict[int, tuple[int, int]] = {}  # the id of each gradient that has arrived, and its version then
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._stay, number))
            for number, parameter in enumerate(self.parameters)
        ]

    def begin(self, step: int = 0) -> None:
        """Forget the last step; the shard follows, if it is this worker's."""
        super().begin(step)
        self._seen = {}

    @torch.no_grad()
    def close(self) -> None:
        """End the shard: check gradients that did not arrive one by one, or that a hook of the script has changed."""
        gradients = [*map(GRADIENT, self.parameters)]
        self._note(range(len(gradients)), gradients)
        for number, gradient in enumerate(gradients):
            if self.mark is not None:
                self.mark.take(number, gradient)
            if gradient is not None:
                is_new = self._seen.get(number) != (id(gradient), gradient._version)
                self.checks.stays(number, gradient, is_new=is_new)

    def unscale(self, scale: float) -> None:
        """Divide the gradients by the scale of the loss."""
        if scale != 1.0:
            present = [parameter.grad for parameter in self.trained if parameter.grad is not None]
            torch._foreach_div_(present, scale)
            self.keep()

    def _places_of_mean(self) -> Iterable[Tensor | None]:
        return map(GRADIENT, self.parameters)

    def _stay(self, number: int, parameter: Tensor) -> None:
        if self._listens and (gradient := parameter.grad) is not None:
            self.checks.arrived(number, gradient)  # if it came in several parts, it includes the earlier ones
            self._seen[number] = id(gradient), gradient._version
