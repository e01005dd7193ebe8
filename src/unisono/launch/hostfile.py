"""The hosts of a job as people write them, in a list or a hostfile, and how they are reached over ssh."""

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.errors import JobError
from unisono.launch.engine import Engine, Ssh, address_of_host
from unisono.launch.settings import MOST_WORKERS
from unisono.received import open_file, short, whole_number

HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])")
"""A name or an address, maybe with a user; an address with colons stands in brackets. It is never an option of ssh."""

LARGEST_FILE = 2**20
SLOTS = ("slots", "max_slots", "max-slots")


@dataclass(frozen=True, slots=True)
class HostSlots:
    """A host, and the number of workers for which it has room.

    Attributes:
        name: the name or address that ssh gets, maybe with a user.
    """

    name: str
    slots: int = 1


def read_hosts(text: str) -> tuple[HostSlots, ...]:
    """The hosts of an option: ``a:4,b:4``, or the name of a hostfile.

    Raises:
        JobError: it is neither; says what is wrong, and in which line.
    """
    path = Path(text)
    if not _is_file(path):
        if "/" in text:
            is_there = os.path.lexists(text)
            raise JobError(
                f"--hosts {short(text)}: "
                + ("that is no file; write the hosts into one" if is_there else "there is no such hostfile")
            )
        return _merged((_host(word.strip(), f"--hosts {short(text)}") for word in text.split(",")), "--hosts")
    try:
        with open_file(path) as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise JobError(f"the hostfile {path} has more than {LARGEST_FILE} bytes")
        return parse_hostfile(data.decode("utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"the hostfile {path} cannot be read: {error}") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a name, or no name at all
        return False


def parse_hostfile(text: str, name: str) -> tuple[HostSlots, ...]:
    """The hosts of a hostfile: lines of ``host``, ``host:4`` or ``host slots=4``; a ``#`` begins a comment.

    Raises:
        JobError: a line is none of these, or there is no host; names the line.
    """
    return _merged(_lines(text, name), f"the hostfile {name}")


def _lines(text: str, name: str) -> Iterator[HostSlots]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            yield _with_settings(_host(words[0], where := f"{name}, line {number}"), words, where)


def _with_settings(host: HostSlots, words: list[str], where: str) -> HostSlots:
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in SLOTS:
            raise JobError(f"{where}: {short(word)}: write 'host', 'host:4' or 'host slots=4'")
        count = _slots(value, f"{where}: {short(word)}")
        if key == "slots":
            if ":" in words[0].rpartition("]")[2]:
                raise JobError(f"{where}: {short(' '.join(words))} says twice how many slots there are")
            host = replace(host, slots=count)
    return host


def _host(word: str, where: str) -> HostSlots:
    parts = re.fullmatch(rf"({HOST.pattern})(?::(.*))?", word)
    if parts is None or ("[" not in word and word.count(":") > 1):
        raise JobError(
            f"{where}: {short(word)} is no host: write a name or an address, as in a, a:4, user@a:4 or [fd00::1]:4"
        )
    name = parts[1].replace("[", "").replace("]", "")
    return HostSlots(name, 1 if parts[2] is None else _slots(parts[2], f"{where}: {short(word)}"))


def _slots(text: str, where: str) -> int:
    count = whole_number(text)
    if count is None or not 1 <= count <= MOST_WORKERS:
        raise JobError(f"{where}: {short(text)} is no number of workers; write one from 1 to {MOST_WORKERS}")
    return count


def _merged(hosts: Iterable[HostSlots], where: str) -> tuple[HostSlots, ...]:
    """Each host once, with the sum of its slots.

    Raises:
        JobError: a host has too many slots, or there is no host.
    """
    slots_of: dict[str, int] = {}
    for host in hosts:
        slots_of[host.name] = slots_of.get(host.name, 0) + host.slots
        if slots_of[host.name] > MOST_WORKERS:
            raise JobError(f"{where}: {host.name} has more than {MOST_WORKERS} slots, all of its lines together")
    if not slots_of:
        raise JobError(f"{where}: there is no host in it")
    return tuple(HostSlots(name, slots) for name, slots in slots_of.items())


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The hosts of a job.

    Attributes:
        here: the number of workers for which the launcher's host has room.
    """

    here: int
    elsewhere: tuple[HostSlots, ...]
    engine: Engine = field(default_factory=Ssh, compare=False)

    @classmethod
    def of(cls, hosts: Iterable[HostSlots], is_here: Callable[[str], bool], engine: Engine) -> "HostPlan":
        """The plan for these hosts, of which ``is_here`` says whether a name is that of the launcher's host."""
        located = [(host, is_here(host.name)) for host in hosts]
        elsewhere = tuple(host for host, here in located if not here)
        return cls(sum(host.slots for host, here in located if here), elsewhere, engine)

    @property
    def towards(self) -> str:
        """The address of the first of the other hosts; empty without one."""
        return address_of_host(self.engine, self.elsewhere[0].name) if self.elsewhere else ""

    @property
    def room(self) -> int:
        """The number of workers for which all hosts together have room."""
        return self.here + sum(host.slots for host in self.elsewhere)

    def first(self, workers: int) -> "HostPlan":
        """The first of the hosts that have room for so many workers; the launcher's own comes before all others."""
        here, left, chosen = min(self.here, workers), workers - min(self.here, workers), []
        for host in self.elsewhere:
            if (slots := min(host.slots, left)) > 0:
                chosen.append(replace(host, slots=slots))
                left -= slots
        return replace(self, here=here, elsewhere=tuple(chosen))


def is_here(name: str) -> bool:
    """Whether a name or address is that of this host, which needs no ssh. One with a user never is."""
    if "@" in name:
        return False
    if name in ("localhost", socket.gethostname()):
        return True
    with suppress(OSError, UnicodeError):
        family, _, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # fails for an address of another host
            return True
    return False
