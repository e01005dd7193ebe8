"""At which of its addresses a host's workers are reached by those of others."""

import os
import socket

import psutil

from unisono.errors import LaunchError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def data_address(coordinator: str, towards_it: str) -> str:
    """The address of the network interface ``GLOO_SOCKET_IFNAME``, or the one from which the coordinator is reached.

    Args:
        coordinator: its host. Workers that reach it on loopback share a host.
        towards_it: this host's address on that connection; empty if there is none.

    Raises:
        LaunchError: it is an address that has no meaning on other hosts.
    """
    if coordinator in _LOOPBACK:
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    known = psutil.net_if_addrs().get(interface, [])
    given = [address.address for family in _FAMILIES for address in known if address.family == family]
    found = next((address for address in given if "%" not in address), None) or towards_it or _named()
    if "%" in found or found.lower().startswith("fe80:"):
        raise LaunchError(
            f"this host is reached at {found}, which other hosts cannot call: it belongs to one interface. Reach the "
            f"coordinator at another address, or set GLOO_SOCKET_IFNAME to an interface that has one"
        )
    return found


def _named() -> str:
    """The address of this host's name."""
    known = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return str(min(known, key=lambda one: _FAMILIES.index(one[0]))[4][0])
