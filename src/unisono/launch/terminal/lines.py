"""Cutting what a worker writes into lines that can be shown."""

import re

END = re.compile(rb"\r?\n|\r(?!\Z)")
"""The end of a line, or of a progress bar's update. A carriage return in the last place may be either."""

LONGEST = 32 * 1024
UPDATE_EVERY_S = 1.0


class LineSplitter:
    """Takes bytes as they come, gives lines of text.

    What a carriage return ends is an update of a progress bar: the next one would overwrite it, so one a second
    is enough. A line longer than ``longest`` bytes comes in pieces. Bytes that are no UTF-8 become a
    replacement mark.
    """

    def __init__(self, longest: int = LONGEST, update_every_s: float = UPDATE_EVERY_S) -> None:
        self._longest = longest
        self._update_every_s = update_every_s
        self._rest = b""
        self._overwritten = b""
        self._updated_at = -float("inf")

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that these bytes complete.

        Args:
            data: what came.
            now: a clock that never goes back, in seconds.
        """
        known = max(0, len(self._rest) - 1)  # no end of a line in there, save a carriage return in the last place
        buffer = self._rest + data
        lines: list[str] = []
        start = 0
        for end in END.finditer(buffer, known):
            lines += self._ended(buffer[start : end.start()], end.group(), now)
            start = end.end()
        pieces, self._rest = self._cut(buffer[start:])
        return lines + pieces

    def flush(self) -> list[str]:
        """What is left when nothing more comes."""
        rest = self._rest.rstrip(b"\r") or self._overwritten
        self._rest = self._overwritten = b""
        return [_text(rest)] if rest else []

    def _ended(self, line: bytes, end: bytes, now: float) -> list[str]:
        is_update = end == b"\r"
        if is_update and not line:
            return []
        if is_update and now - self._updated_at < self._update_every_s:
            self._overwritten = line
            return []
        self._overwritten = b""
        if is_update:
            self._updated_at = now
        pieces, rest = self._cut(line)
        return [*pieces, _text(rest)] if rest or not pieces else pieces

    def _cut(self, line: bytes) -> tuple[list[str], bytes]:
        """Pieces of the greatest length, and the rest."""
        pieces, start = [], 0
        while len(line) - start > self._longest:
            stop = start + self._longest
            while stop > start + self._longest - 3 and _continues_a_character(line[stop]):
                stop -= 1
            pieces.append(_text(line[start:stop]))
            start = stop
        return pieces, line[start:]


def _continues_a_character(byte: int) -> bool:
    return byte & 0b1100_0000 == 0b1000_0000


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")
