"""The messages between two workers, and their form on the wire."""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import socket
import ssl
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.errors import Unreadable
from unisono.received import memory, parse_object
from unisono.reduce.admission import MOST_CALLERS, fill, identify, receive
from unisono.reduce.buckets import NOTHING

# Where workers can be called: addresses that are made here, and those that came from others.

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


Address = str | tuple[str, int]
"""Where a worker can be called: the name of a Unix socket, or host and port."""


def calling(address: Address) -> socket.socket:
    """A socket from which to call there."""
    return socket.socket(socket.AF_UNIX if isinstance(address, str) else family_of(address[0]))


def address_of(listening: socket.socket) -> Address:
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


# What two workers say to each other, and how it travels.

LARGEST_HEADER = 2**20
"""Bytes of what is said besides the tensors."""

_SIZES = struct.Struct("<IQ")  # of what is said, and of the tensors


@dataclass(frozen=True, slots=True)
class RpcMessage:
    """A message from one worker to another.

    Attributes:
        said: JSON values by name.
        packed: tensors as bytes, see :func:`unisono.reduce.buckets.pack`: uint8, 1-D.
    """

    said: Mapping[str, Any] = field(default_factory=dict)
    packed: Tensor = NOTHING


class RpcConnection:
    """A connection between two workers of this generation.

    Args:
        connection: the connected socket, taken over.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: RpcMessage) -> int:
        """Send; returns the number of bytes.

        Raises:
            OSError: the other side is gone, or takes nothing.
        """
        said = json.dumps(dict(message.said)).encode()
        self._connection.sendall(_SIZES.pack(len(said), message.packed.numel()) + said)
        if message.packed.numel():
            self._connection.sendall(message.packed.numpy().data)
        return _SIZES.size + len(said) + message.packed.numel()

    def receive(self) -> RpcMessage:
        """Wait for a message.

        Raises:
            EOFError, OSError: the other side is gone, or says nothing.
            Unreadable: it says what is no message.
        """
        said, size = _SIZES.unpack(receive(self._connection, _SIZES.size))
        if said > LARGEST_HEADER or size > memory():
            raise Unreadable(f"another worker announces {said} bytes of text and {size} of tensors: that is no message")
        found = parse_object(receive(self._connection, said))
        packed = torch.empty(size, dtype=torch.uint8) if size else NOTHING
        fill(self._connection, packed.numpy().data)
        return RpcMessage(found, packed)

    def encrypt(self, context: ssl.SSLContext, caller: int, called: int, timeout_s: float) -> None:
        """Go on over TLS.

        Args:
            context: TLS, with keys that only this generation's workers have.
            caller: the rank of the worker that has called.
            called: the rank of the other one.
            timeout_s: the longest wait for the other side to answer, in seconds.

        Raises:
            EOFError, OSError: the other side does not belong here, or has hung up.
        """
        calls = context.protocol is ssl.PROTOCOL_TLS_CLIENT
        self._connection = context.wrap_socket(self._connection, server_side=not calls, do_handshake_on_connect=False)
        self._connection.settimeout(timeout_s)  # the kernel's own limits are none for TLS
        identify(self._connection, caller, called)
        if not calls:
            self._connection.settimeout(None)  # whoever answers waits for questions as long as it takes

    def hang_up(self) -> None:
        """Wake whoever reads or writes. From any thread."""
        with suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # TLS says nothing more

    def close(self) -> None:
        """Give the connection back."""
        self._connection.close()
