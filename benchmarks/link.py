"""Hosts of our own on this machine, joined by slow cables: network namespaces, veth pairs, ``tc``."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.crew import Host

TOOLS = ("ip", "tc", "unshare", "nsenter")
PACKETS = 100_000
"""What netem may hold back: more than a connection has under way, so that nothing is dropped."""


class NoLink(Exception):
    """Such a link cannot be made here; says why."""


@dataclass(frozen=True, slots=True)
class Cable:
    """How slow, in the words of ``tc``: ``1gbit``, ``1ms``. The delay is that of one way.

    After a pause a burst goes at full speed, where there is no netem.
    """

    rate: str = "1gbit"
    delay: str = "1ms"
    burst: str = "256kb"

    def queues(self, interface: str) -> dict[str, list[str]]:
        """The commands that slow an interface down, best first, by what they bring about."""
        queue = ["tc", "qdisc", "replace", "dev", interface, "root"]
        return {
            f"{self.rate}, {self.delay} (netem)": [
                *queue, "netem", "rate", self.rate, "delay", self.delay, "limit", str(PACKETS)
            ],
            f"{self.rate}, no added delay (tbf; this kernel has no netem)": [
                *queue, "tbf", "rate", self.rate, "burst", self.burst, "latency", "100ms"
            ],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Link:
    """Two hosts and what lies between them, in words."""

    hosts: tuple[Host, Host]
    speed: str


@contextmanager
def slow_link(cable: Cable) -> Iterator[Link]:
    """Two hosts, as long as the context lasts.

    Their namespaces have no name: they live as long as a process is in them. Each is held by one that ends when this
    process does, however that comes about; so nothing stays behind, and nothing is seen from outside.

    Raises:
        NoLink: not root, a tool is missing, or the kernel cannot do it.
    """
    if reason := obstacle():
        raise NoLink(reason)
    with ExitStack() as opened:
        holders = [opened.enter_context(_namespace()) for _ in range(2)]
        ends = [End(number, pid) for number, pid in enumerate(holders)]
        _do(joined(ends))
        for end in ends:
            for command in end.brought_up():
                _do(command)
        speeds = {_slowed(end.host.enter, end.interface, cable) for end in ends}
        yield Link((ends[0].host, ends[1].host), " / ".join(sorted(speeds)))


@dataclass(frozen=True, slots=True)
class Mesh:
    """Hosts that have a cable to each other one.

    Attributes:
        hosts: by number.
        speed: of all cables, in words.
        cables: by the numbers of the host and of its neighbour, the host's interface.
    """

    hosts: tuple[Host, ...]
    speed: str
    cables: dict[tuple[int, int], str]

    def slowed(self, a: int, b: int, cable: Cable) -> dict[int, list[str]]:
        """The commands with which two hosts make the cable between them another one; each gives its own."""
        kind = 0 if "(netem)" in self.speed else 1
        return {host: list(cable.queues(self.cables[host, peer]).values())[kind] for host, peer in ((a, b), (b, a))}


@contextmanager
def mesh(count: int, cable: Cable) -> Iterator[Mesh]:
    """So many hosts, as long as the context lasts. A host has one address, over whichever cable it is reached.

    Raises:
        NoLink: not root, a tool is missing, or the kernel cannot do it.
    """
    if reason := obstacle():
        raise NoLink(reason)
    numbers = range(count)
    with ExitStack() as opened:
        pids = [opened.enter_context(_namespace()) for _ in numbers]
        enter = [("nsenter", f"--net=/proc/{pid}/ns/net") for pid in pids]
        cables = {(a, b): f"to{b}" for a in numbers for b in numbers if a != b}
        for a, b in ((a, b) for a, b in cables if a < b):
            peer = ["peer", "name", cables[b, a], "netns", str(pids[b])]
            _do(["ip", "link", "add", cables[a, b], "netns", str(pids[a]), "type", "veth", *peer])
        speeds = set()
        for a in numbers:
            first = next(interface for (host, _), interface in cables.items() if host == a)
            _do([*enter[a], "ip", "link", "set", "lo", "up"])
            _do([*enter[a], "ip", "address", "add", f"{_address(a)}/32", "dev", first])
            for (host, peer_number), interface in cables.items():
                if host == a:
                    _do([*enter[a], "ip", "link", "set", interface, "up"])
                    way = ["dev", interface, "src", _address(a)]
                    _do([*enter[a], "ip", "route", "add", f"{_address(peer_number)}/32", *way])
                    speeds.add(_slowed(enter[a], interface, cable))
        hosts = tuple(Host(_address(a), f"to{0 if a else 1}", enter[a]) for a in numbers)
        yield Mesh(hosts, " / ".join(sorted(speeds)), cables)


@contextmanager
def switched(count: int, cable: Cable) -> Iterator[tuple[tuple[Host, ...], str]]:
    """So many hosts, each with one cable to a switch, as long as the context lasts; and the cables' speed in words.

    A cable is as slow towards the host as it is from there.

    Raises:
        NoLink: not root, a tool is missing, or the kernel cannot do it.
    """
    if reason := obstacle():
        raise NoLink(reason)
    with ExitStack() as opened:
        switch, *pids = (opened.enter_context(_namespace()) for _ in range(count + 1))
        inside = ["nsenter", f"--net=/proc/{switch}/ns/net"]
        _do([*inside, "ip", "link", "add", "switch", "type", "bridge"])
        _do([*inside, "ip", "link", "set", "switch", "up"])
        hosts, speeds = [], set()
        for number, pid in enumerate(pids):
            host = Host(f"10.80.0.{number + 1}", f"cable{number}", ("nsenter", f"--net=/proc/{pid}/ns/net"))
            port = ["peer", "name", f"port{number}", "netns", str(switch)]
            _do(["ip", "link", "add", host.interface, "netns", str(pid), "type", "veth", *port])
            _do([*inside, "ip", "link", "set", f"port{number}", "master", "switch", "up"])
            _do([*host.enter, "ip", "address", "add", f"{host.address}/24", "dev", host.interface])
            _do([*host.enter, "ip", "link", "set", host.interface, "up"])
            _do([*host.enter, "ip", "link", "set", "lo", "up"])
            speeds |= {_slowed(host.enter, host.interface, cable), _slowed(inside, f"port{number}", cable)}
            hosts.append(host)
        yield tuple(hosts), " / ".join(sorted(speeds))


def _address(number: int) -> str:
    return f"10.79.0.{number + 1}"


def obstacle() -> str:
    """Why it cannot be tried; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed (iproute2, util-linux)" if missing else ""


@dataclass(frozen=True, slots=True)
class End:
    """One end of the cable, in a namespace of its own.

    Attributes:
        number: 0 or 1.
        pid: of a process in its namespace.
    """

    number: int
    pid: int

    @property
    def interface(self) -> str:
        """Its name in its namespace."""
        return f"cable{self.number}"

    @property
    def host(self) -> Host:
        """As a place for a worker."""
        return Host(f"10.77.0.{self.number + 1}", self.interface, ("nsenter", f"--net=/proc/{self.pid}/ns/net"))

    def brought_up(self) -> list[list[str]]:
        """The commands that bring it up."""
        inside = self.host.enter
        return [
            [*inside, "ip", "address", "add", f"{self.host.address}/24", "dev", self.interface],
            [*inside, "ip", "link", "set", self.interface, "up"],
            [*inside, "ip", "link", "set", "lo", "up"],
        ]


def joined(ends: Sequence[End]) -> list[str]:
    """The command that lays the cable, straight from one namespace into the other."""
    first, second = ends
    return [
        "ip", "link", "add", first.interface, "netns", str(first.pid), "type", "veth",
        "peer", "name", second.interface, "netns", str(second.pid),
    ]  # fmt: skip


@contextmanager
def _namespace() -> Iterator[int]:
    """A process in a network namespace of its own, that ends when its input does: with us, at the latest."""
    command = [shutil.which("unshare") or "unshare", "--net", "cat"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        holder.stdin.write(b"there?\n")
        holder.stdin.flush()
        if not holder.stdout.readline():  # it answers from inside
            raise NoLink("unshare --net failed: no network namespaces here")
        yield holder.pid


def _slowed(enter: Sequence[str], interface: str, cable: Cable) -> str:
    refused = []
    for speed, command in cable.queues(interface).items():
        try:
            _do([*enter, *command])
        except NoLink as error:
            refused.append(str(error))
        else:
            return speed
    raise NoLink("; ".join(refused))


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLink(f"'{' '.join(command)}' failed: {done.stderr.strip()}")
