"""Which part of something large is looked at in a step, so that all of it is in turn."""

from collections.abc import Sequence

ALIGNMENT = 64


def windows(lengths: Sequence[int], size: int, budget: int | None, turn: int) -> list[range]:
    """Of each buffer the elements that are looked at: all of them, or equal parts in turn.

    Args:
        lengths: of the buffers, in elements.
        size: of all together, in bytes.
        budget: bytes that may be looked at in one turn; None for all.
        turn: the number of the turn. As many as there are parts, one after the other, see every element.
    """
    if budget is None or size <= budget:
        return [range(length) for length in lengths]
    if budget <= 0:
        return [range(0) for _ in lengths]
    parts = -(-size // budget)
    return [_part(length, turn % parts, parts) for length in lengths]


def _part(length: int, number: int, parts: int) -> range:
    width = -(-length // (ALIGNMENT * parts)) * ALIGNMENT
    start = min(number * width, length)
    return range(start, min(start + width, length))
