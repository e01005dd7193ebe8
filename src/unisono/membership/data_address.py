"""At which of its addresses a host's workers are reached by those of others."""

import os
import socket

import psutil

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def data_address(coordinator: str, towards_it: str) -> str:
    """The address of the network interface ``GLOO_SOCKET_IFNAME``, or the one from which the coordinator is reached.

    Args:
        coordinator: its host. Workers that reach it on loopback share a host.
        towards_it: this host's address on that connection; empty if there is none.
    """
    if coordinator in _LOOPBACK:
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    known = psutil.net_if_addrs().get(interface, [])
    given = [address.address for address in known if address.family == socket.AF_INET]
    return given[0] if given else towards_it or socket.gethostbyname(socket.gethostname())
