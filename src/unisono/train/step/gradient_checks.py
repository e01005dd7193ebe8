"""Checks that memory has kept a step's gradients, and that they are finite."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from torch import Tensor

from unisono.reduce.partial_sums import UNTALLIED, Tally, Witness, windows
from unisono.train.step.shard_digest import in_memory_order
from unisono.words import LONG, Finiteness, Words

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
            flat = values if values.is_contiguous() else in_memory_order(values)
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
