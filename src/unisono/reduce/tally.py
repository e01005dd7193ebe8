"""Tells whether memory kept what was written to it: what is written is added up, and what is read is taken off."""

from collections.abc import Callable, Sequence

from torch import Tensor

from unisono.finite import Finiteness
from unisono.words import MODULUS, Words

PRIME = 2**63 - 25
"""Modulo which no number of copies hides a flipped bit: 2 times 2**63 is nothing modulo 2**64."""

Witness = Callable[[str, Tensor], None]
"""Shown what was just written, before anybody reads it; ``partial_sum``, ``gradient`` or ``shard_buffer`` says what."""


class Tally:
    """The sum of the 64-bit words that were written to a bucket's buffers, less those that were read from them.

    Whoever writes a partial sum adds its words, whoever reads it takes them off, on whatever worker. Over all workers
    nothing is left if every word was read as it was written; a bit that flipped in between leaves its power of two.
    Of what all workers get a copy, each takes off what it got.

    It also looks at the sums that this worker finishes, all of them: whether they are finite.

    Args:
        start: the first element of the bucket that is looked at.
        stop: the element behind the last one.
        witness: a function that gets what was just written, to inject a fault; see :data:`Witness`.

    Attributes:
        balance: the words written less those read on this worker, of memory that is read once.
        copies: the same difference, of memory that every worker gets.
        finished: what tells whether what this worker has finished is finite.
    """

    def __init__(self, start: int = 0, stop: int = 2**62, witness: Witness | None = None) -> None:
        self.balance = self.copies = 0
        self._start, self._stop = start, stop
        self._witness = witness
        self.finished = Finiteness()
        self._kept: list[tuple[Words, int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether none of the bucket's elements are looked at."""
        return self._stop <= self._start

    def wrote(self, values: Tensor | Words, start: int, copies: int = 0) -> None:
        """Values were written, which somebody will read once.

        Args:
            values: 1-D; given as words, they are summed sooner.
            start: their offset in the bucket, in elements.
            copies: the number of workers, this one included, that receive these very values instead.
        """
        if copies:
            self.copies += copies * self._sum(values, start)
        else:
            self.balance += self._sum(values, start)
        if self._witness is not None:
            self._witness("partial_sum", values.values if isinstance(values, Words) else values)

    def read(self, values: Tensor | Words, start: int) -> None:
        """Values are about to be read; see :meth:`wrote`."""
        self.balance -= self._sum(values, start)

    def keep(self, values: Tensor | Words, start: int) -> None:
        """Values were written that stay until :meth:`has_kept` asks for them."""
        if (part := self._part(values, start)) is not None:
            self._kept.append((part, part.sum()))

    def receive(self, values: Tensor, start: int) -> None:
        """Values are here that one worker wrote and all get, and stay: they are read and kept at once."""
        self.keep(values, start)
        if self._part(values, start) is not None:
            self.copies -= self._kept[-1][1]

    def part(self, start: int) -> "Tally":
        """A tally of its own for the elements of this bucket from ``start`` on."""
        part = Tally(self._start - start, self._stop - start, self._witness)
        part.finished = self.finished
        return part

    def close(self, part: "Tally") -> None:
        """What is in a part's tally counts here; what it keeps has been read for the last time."""
        self.balance += part.balance if part.has_kept() else part.balance + 1
        self.copies += part.copies

    def show(self) -> None:
        """Let the witness see what is kept."""
        for part, _ in self._kept if self._witness is not None else ():
            assert self._witness is not None
            self._witness("gradient", part.values)

    def has_kept(self) -> bool:
        """Whether everything that was kept is as it was."""
        return all(part.sum() == words for part, words in self._kept)

    def _part(self, values: Tensor | Words, start: int) -> Words | None:
        numel = values.numel() if isinstance(values, Tensor) else len(values)
        begin, end = max(self._start - start, 0), min(self._stop - start, numel)
        if begin >= end:
            return None
        if end - begin == numel:
            return values if isinstance(values, Words) else Words(values)
        return Words((values if isinstance(values, Tensor) else values.values)[begin:end])

    def _sum(self, values: Tensor | Words, start: int) -> int:
        part = self._part(values, start)
        return 0 if part is None else part.sum()


def is_balanced(balances: Sequence[int], copies: Sequence[int]) -> bool:
    """Whether nothing is left of all workers' tallies."""
    return sum(balances) % MODULUS == 0 and sum(copies) % PRIME == 0
