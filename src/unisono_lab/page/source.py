"""Where a page finds its run: in the run folder, or with the coordinator of another host."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import JobError, Unreadable
from unisono.launch.elastic.address import WHERE, Address, Control, address_of
from unisono.received import parse_json, read_part

JOURNAL, METRICS, JOB, RESULT = "journal.jsonl", "metrics.jsonl", "job.json", "result.json"


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A run folder on this host.

    Attributes:
        folder: the path of the folder.
        certificate: the certificate that the coordinator shows, if it is not the one in the folder.
    """

    folder: Path
    certificate: Path | None = None

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.absolute().name

    @property
    def poll_s(self) -> float:
        """How often the journal is looked at, in seconds: looking at a file that has not changed is cheap."""
        return 0.3

    def stamp(self, name: str) -> object:
        """The file's number, length and time of change: another as soon as the file is; None if that cannot be told."""
        try:
            found = (self.folder / name).stat()
        except OSError:  # reading tells why
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def read(self, name: str, first: int, most: int) -> bytes:
        """Some bytes of a file of the run folder; none if there is no such file.

        Raises:
            JobError: it cannot be read.
        """
        try:
            return read_part(self.folder / name, first, most)
        except (OSError, Unreadable) as error:
            raise JobError(f"{self.folder / name} cannot be read: {error}") from error

    def control(self) -> Control | None:
        """The coordinator that listens now; None if there is none."""
        if not (self.folder / WHERE).exists():
            return None
        return Control(address_of(self.folder, self.certificate))


@dataclass(frozen=True, slots=True)
class CoordinatorSource:
    """A job whose coordinator runs on another host.

    Attributes:
        address: the coordinator's address.
    """

    address: Address

    @property
    def name(self) -> str:
        """The coordinator's URL."""
        return self.address.url

    @property
    def poll_s(self) -> float:
        """Each look is a connection of its own, which the coordinator of a job that trains has to answer."""
        return 0.5

    def stamp(self, name: str) -> None:
        """It does not say."""

    def read(self, name: str, first: int, most: int) -> bytes:
        """From the coordinator's run folder.

        Raises:
            LaunchError: it cannot be had now.
        """
        return self.control().record(name, first, most)

    def control(self) -> Control:
        """That coordinator."""
        return Control(self.address)


RunSource = FolderSource | CoordinatorSource
"""A run, as far as it can be read and asked."""


# Follows a file of JSON lines that others append to, and sometimes replace.


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
