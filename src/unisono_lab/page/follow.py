"""Follows a file of JSON lines that others append to, and sometimes replace."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from unisono.received import parse_json

PART = 2**18
"""Bytes that are read at once."""

LONGEST_LINE = 2**24

Read = Callable[[str, int, int], bytes]
"""Reads some bytes of a file of the run folder: its name, the first byte, and how many at most. Fewer are the end of
the file; none may mean that there is no such file."""


@dataclass(frozen=True, slots=True)
class NewLines:
    """What has come.

    Attributes:
        lines: the objects in the lines that were not known. Damaged lines are left out.
        anew: whether they are the first ones of another file by this name.
        more: whether there is more to read at once.
        first: the number of the first byte of these lines in the file.
        end: the number of the byte behind them.
    """

    lines: list[dict[str, Any]]
    anew: bool = False
    more: bool = False
    first: int = 0
    end: int = 0


class Follower:
    """Knows how far a file was read, and notices by the last line whether it is still the same one.

    Args:
        name: the name of the file.
        first: the number of the byte, the first of a line, from which on it is read.
    """

    def __init__(self, name: str, first: int = 0) -> None:
        self._name = name
        self._at = first
        self._last = b""
        self._most = PART

    def news(self, read: Read) -> NewLines:
        """What has come since the last time."""
        known = len(self._last)
        data = read(self._name, self._at - known, known + self._most)
        if not data.startswith(self._last):
            self._at, self._last, self._most = 0, b"", PART
            return NewLines([], anew=True, more=True)
        new = data[known:]
        end = new.rfind(b"\n") + 1
        is_full = len(new) == self._most
        if end == 0:
            if is_full:
                self._make_room(new)
            return NewLines([], more=is_full)
        lines = new[:end].splitlines(keepends=True)
        first, self._at, self._last, self._most = self._at, self._at + end, lines[-1][-PART:], PART
        found = [one for line in lines if (one := _object(line)) is not None]
        return NewLines(found, more=is_full, first=first, end=self._at)

    def _make_room(self, part: bytes) -> None:
        """A line is longer than what was read of it. One that is too long is passed over."""
        if self._most < LONGEST_LINE:
            self._most *= 2
        else:
            self._at, self._last = self._at + len(part), part[-PART:]


def _object(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):
        found = parse_json(line)
        return found if isinstance(found, dict) else None
    return None
