"""The pieces of a split update: which worker of a host updates which elements, and in which order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unisono.reduce.buckets import Bucket
from unisono.reduce.host_memory import part_of
from unisono.reduce.transport import PIECE


@dataclass(frozen=True, slots=True)
class Slice:
    """Neighbouring elements of a parameter, in the order of memory.

    Attributes:
        number: the number of the parameter.
        start: the first element.
        stop: the element behind the last.
    """

    number: int
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """Neighbouring elements of a bucket, which one worker updates at once.

    Attributes:
        bucket: the number of the bucket.
        start: the first element, a multiple of 64.
        stop: the element behind the last, likewise.
        slices: what lies there of which parameters.
    """

    bucket: int
    start: int
    stop: int
    slices: tuple[Slice, ...]


def pieces_of(buckets: Sequence[Bucket], worker: int, workers: int, size: int = PIECE) -> tuple[UpdatePiece, ...]:
    """The pieces of one worker of a host, in the order in which it updates them.

    Args:
        buckets: the layout of the parameters.
        worker: the worker's number on its host.
        workers: the number of workers on its host.
        size: the largest piece, in elements; a multiple of 64.
    """
    return tuple(
        UpdatePiece(number, start, stop, tuple(_slices(bucket, start, stop)))
        for number, bucket in enumerate(buckets)
        for start, stop in _cut(part_of(bucket.numel, worker, workers), size)
    )


def _cut(mine: range, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, mine.stop)) for start in mine[::size])


def _slices(bucket: Bucket, start: int, stop: int) -> Iterator[Slice]:
    for entry in bucket.entries:
        begin, end = (min(max(edge - entry.offset, 0), entry.numel) for edge in (start, stop))
        if begin < end:
            yield Slice(entry.index, begin, end)
