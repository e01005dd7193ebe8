"""Where workers can be called: addresses that are made here, and those that came from others."""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket

from unisono.reduce.admission import MOST_CALLERS

_NAME = re.compile(r"\0unisono-[0-9a-f]{32}")


def listen(host: str) -> socket.socket:
    """A socket that listens.

    Args:
        host: the address at which workers of other hosts call; empty for a Unix socket, which has no name among files.
    """
    listening = socket.socket(family_of(host) if host else socket.AF_UNIX)
    try:
        listening.bind((host, 0) if host else f"\0unisono-{secrets.token_hex(16)}")
        listening.listen(MOST_CALLERS)
    except OSError:
        listening.close()
        raise
    return listening


def address_of(listening: socket.socket) -> str | tuple[str, int]:
    """Where to call, as JSON values."""
    address = listening.getsockname()
    return address.decode("ascii") if isinstance(address, bytes) else (address[0], address[1])


def is_name(name: str) -> bool:
    """Whether workers listen at Unix sockets of such names."""
    return _NAME.fullmatch(name) is not None


def is_host(host: str) -> bool:
    """Whether this is an address of a host, and not a name that somebody would have to be asked for."""
    try:
        return "%" not in str(ipaddress.ip_address(host))  # that would be an interface of the other host
    except ValueError:
        return False


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 where the address is one of these."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
