"""Two hosts of our own on this machine: namespaces with a name and a network of their own, and a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

TOOLS = ("ip", "unshare", "nsenter", "hostname")


NOWHERE = "9"
"""A routing table by which packets get lost."""


class NoHosts(Exception):
    """They cannot be made here; says why."""


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        name: its own.
        address: on the cable.
        pid: of the process that holds its namespaces.
    """

    name: str
    address: str
    pid: int

    @property
    def enter(self) -> list[str]:
        """What comes before a command that is to run there; it becomes the command, with its process id."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", f"--uts=/proc/{self.pid}/ns/uts"]

    def cable(self, state: str) -> None:
        """Pull the cable out (``down``), or put it back (``up``). Nobody is told: what is sent is lost."""
        _do([*self.enter, "ip", "link", "set", self.name, state])

    def reach_only(self, other: Host, port: int) -> None:
        """From now on, what is sent to other TCP ports of that host is lost on the way, as behind a firewall."""
        to = ["to", other.address, "ipproto", "tcp"]
        _do([*self.enter, "ip", "route", "add", other.address, "dev", "lo", "table", NOWHERE])
        _do([*self.enter, "ip", "rule", "add", "pref", "100", *to, "dport", str(port), "lookup", "main"])
        _do([*self.enter, "ip", "rule", "add", "pref", "101", *to, "lookup", NOWHERE])

    def reach_all(self) -> None:
        """All ports again."""
        _do([*self.enter, "ip", "route", "flush", "table", NOWHERE])
        for preference in ("100", "101"):
            _do([*self.enter, "ip", "rule", "del", "pref", preference])


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """As long as the context lasts. Nothing of them has a name outside, and they end with this process at the latest.

    Raises:
        NoHosts: not root, a tool is missing, or the kernel cannot do it.
    """
    _require_tools()
    with ExitStack() as opened:
        hosts = [
            Host(name, f"10.78.0.{number}", opened.enter_context(_namespaces(name)))
            for number, name in enumerate(("hosta", "hostb"), 1)
        ]
        one, other = hosts
        peer = ["peer", "name", other.name, "netns", str(other.pid)]
        _do(["ip", "link", "add", one.name, "netns", str(one.pid), "type", "veth", *peer])
        for host in hosts:
            _do([*host.enter, "ip", "address", "add", f"{host.address}/24", "dev", host.name])
            _do([*host.enter, "ip", "link", "set", "lo", "up"])
            host.cable("up")
        yield one, other


def _require_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise NoHosts(f"namespaces are Linux's, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise NoHosts("making network namespaces needs root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NoHosts(f"{', '.join(missing)} not installed (iproute2, util-linux, hostname)")


@contextmanager
def _namespaces(name: str) -> Iterator[int]:
    """A process in namespaces of its own, that ends when its input does: with us, at the latest."""
    command = ["unshare", "--net", "--uts", "sh", "-c", f"hostname {name} && exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            holder.stdin.write(b"there?\n")
            holder.stdin.flush()
        except BrokenPipeError:
            pass
        if not holder.stdout.readline():  # it answers from inside
            raise NoHosts("unshare --net --uts failed: no namespaces here")
        yield holder.pid


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"'{' '.join(command)}' failed: {done.stderr.strip()}")
