"""At which of its addresses a host's workers are reached by those of others."""

import ipaddress
import os
import socket

import psutil

from unisono.errors import LaunchError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_ELSEWHERE = "192.0.2.1"
"""An address for examples. Nothing is sent there."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def data_address(coordinator: str, towards_it: str) -> str:
    """The address of the network interface ``GLOO_SOCKET_IFNAME``, or the one from which the coordinator is reached.

    Args:
        coordinator: its host. Workers that reach it on loopback share a host.
        towards_it: this host's address on that connection; empty if it is not known.

    Raises:
        LaunchError: it is an address that has no meaning on other hosts.
    """
    if coordinator in _LOOPBACK:
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    known = psutil.net_if_addrs().get(interface, [])
    given = [address.address for family in _FAMILIES for address in known if address.family == family]
    found = next((address for address in given if "%" not in address), None) or towards_it or _own(coordinator)
    if "%" in found or found.lower().startswith("fe80:"):
        raise LaunchError(
            f"this host is reached at {found}, which other hosts cannot call: it belongs to one interface. Reach the "
            f"coordinator at another address, or set GLOO_SOCKET_IFNAME to an interface that has one"
        )
    return found


def _own(coordinator: str) -> str:
    """This host's, towards the coordinator: a host that is the coordinator itself may know its name as loopback."""
    found = _towards(coordinator)
    if not ipaddress.ip_address(found).is_loopback:
        return found
    try:
        return _towards(_ELSEWHERE)
    except LaunchError:  # this host knows no other
        return found


def _towards(host: str) -> str:
    """The address from which this host would send to another one: nothing is sent."""
    try:
        known = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, _, _, _, where = min(known, key=lambda one: _FAMILIES.index(one[0]))
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect(where)
            return str(asked.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"this host finds no way to {host}: {error}") from error
