"""The messages between two workers, and their form on the wire."""

from __future__ import annotations

import json
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
from unisono.reduce.admission import fill, identify, receive
from unisono.reduce.buckets import NOTHING

LARGEST_HEADER = 2**20
"""The most bytes of a message's JSON values."""

_SIZES = struct.Struct("<IQ")  # bytes of the JSON values, and of the tensors


@dataclass(frozen=True, slots=True)
class RpcMessage:
    """A message from one worker to another.

    Attributes:
        packed: tensors as bytes, see :func:`unisono.reduce.buckets.pack`: uint8, 1-D.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    packed: Tensor = NOTHING


class RpcConnection:
    """A connection between two workers of this generation; it owns its socket from now on."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: RpcMessage) -> int:
        """Send a message; returns the number of bytes.

        Raises:
            OSError: the other worker is gone, or does not read.
        """
        text = json.dumps(dict(message.values)).encode()
        self._connection.sendall(_SIZES.pack(len(text), message.packed.numel()) + text)
        if message.packed.numel():
            self._connection.sendall(message.packed.numpy().data)
        return _SIZES.size + len(text) + message.packed.numel()

    def receive(self) -> RpcMessage:
        """Wait for a message.

        Raises:
            EOFError, OSError: the other worker is gone, or does not answer.
            Unreadable: the bytes are no message.
        """
        text_size, size = _SIZES.unpack(receive(self._connection, _SIZES.size))
        if text_size > LARGEST_HEADER or size > memory():
            raise Unreadable(
                f"another worker announces {text_size} bytes of text and {size} of tensors: that is no message"
            )
        values = parse_object(receive(self._connection, text_size))
        packed = torch.empty(size, dtype=torch.uint8) if size else NOTHING
        fill(self._connection, packed.numpy().data)
        return RpcMessage(values, packed)

    def encrypt(self, context: ssl.SSLContext, caller: int, called: int, timeout_s: float) -> None:
        """Continue over TLS, with keys that only this generation's workers have; the caller opened the connection.

        Raises:
            EOFError, OSError: the other side does not belong to this generation, or has closed the connection.
        """
        calls = context.protocol is ssl.PROTOCOL_TLS_CLIENT
        self._connection = context.wrap_socket(self._connection, server_side=not calls, do_handshake_on_connect=False)
        self._connection.settimeout(timeout_s)  # the kernel's limits on the socket do not work for TLS
        identify(self._connection, caller, called)
        if not calls:
            self._connection.settimeout(None)  # a worker that answers waits for questions without limit

    def hang_up(self) -> None:
        """Shut the connection down, which wakes threads that read or write. From any thread."""
        with suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # TLS says nothing more

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()
