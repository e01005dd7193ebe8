"""The parts of the check, one after the other within a time budget, and what each of them has found."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Result = Literal["same", "different", "ok", "over", "skipped", "failed"]
"""Bits are ``same`` or ``different``, a figure is ``ok`` or ``over`` its bound; ``failed``: nothing was found out."""

Found = tuple[str, Result, str]
"""What was checked, the result, and figures or the reason."""


class Deadline:
    """The end of some seconds.

    Args:
        seconds: how long it is until then.
        clock: tells the time.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._end - self._clock())


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check.

    Attributes:
        name: a person knows it by this.
        most_s: the seconds that it takes at most.
        is_of_bits: whether it compares bits; the check fails if they are not the same.
        check: does it until a deadline.
    """

    name: str
    most_s: float
    is_of_bits: bool
    check: Callable[[Deadline], Iterable[Found]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    part: str
    check: str
    result: Result
    note: str


def done(parts: Iterable[Part], budget_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Row]:
    """Do the parts; a failure ends its own part only. One that may take longer than the budget holds is skipped."""
    budget = Deadline(budget_s, clock)
    for part in parts:
        if part.most_s > budget.left:
            note = f"it may take {part.most_s:.0f} s, and {budget.left:.0f} s are left"
            yield Row(part.name, "", "skipped", note)
            continue
        try:
            for check, result, note in part.check(Deadline(part.most_s, clock)):
                yield Row(part.name, check, result, note)
        except Exception as error:  # noqa: BLE001 (whatever it is, the parts behind it are to be done)
            yield Row(part.name, "", "failed", f"{type(error).__name__}: {error}")


def exit_code(parts: Iterable[Part], rows: Iterable[Row]) -> int:
    """1 if bits differ or could not be compared, or if all was skipped; else 0."""
    rows, of_bits = [*rows], {part.name for part in parts if part.is_of_bits}
    is_wrong = any(row.part in of_bits and row.result in ("different", "failed") for row in rows)
    return int(is_wrong or all(row.result == "skipped" for row in rows))


def table(rows: Sequence[Row]) -> str:
    """The rows below each other, in columns."""
    lines = [("part", "check", "result", "note"), *((row.part, row.check, row.result, row.note) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        "  ".join([*(word.ljust(width) for word, width in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in lines
    )
