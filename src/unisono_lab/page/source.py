"""Where a page finds its run: in the run folder, or with the coordinator of another host."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unisono.errors import JobError, Unreadable
from unisono.launch.elastic.address import WHERE, Address, Control, address_of
from unisono.received import read_part

JOURNAL, METRICS, JOB, RESULT = "journal.jsonl", "metrics.jsonl", "job.json", "result.json"


class RunSource(Protocol):
    """A run, as far as it can be read and asked."""

    @property
    def name(self) -> str:
        """Of the run, for people."""
        ...

    @property
    def poll_s(self) -> float:
        """How often its journal is looked at, in seconds: what happens is shown within one."""
        ...

    def stamp(self, name: str) -> object:
        """What is another one as soon as the file is, and costs next to nothing; None if that cannot be told."""

    def read(self, name: str, first: int, most: int) -> bytes:
        """Some bytes of a file of the run folder; none if there is no such file.

        Raises:
            LaunchError: it cannot be had now.
            JobError: it will not be had.
        """

    def control(self) -> Control | None:
        """Whom to ask; None if the job has no coordinator, or none now.

        Raises:
            JobError: there is one, and it cannot be asked.
        """


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
        """Looking at a file that has not changed is cheap."""
        return 0.3

    def stamp(self, name: str) -> object:
        """The file's number, length and time of change."""
        try:
            found = (self.folder / name).stat()
        except OSError:  # reading tells why
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def read(self, name: str, first: int, most: int) -> bytes:
        """From the disk."""
        try:
            return read_part(self.folder / name, first, most)
        except (OSError, Unreadable) as error:
            raise JobError(f"{self.folder / name} cannot be read: {error}") from error

    def control(self) -> Control | None:
        """The coordinator that listens now."""
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
        """From the coordinator's run folder."""
        return self.control().record(name, first, most)

    def control(self) -> Control:
        """That coordinator."""
        return Control(self.address)
