"""What two workers say to each other, and how it travels."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.errors import Unreadable
from unisono.received import memory, parse_object
from unisono.reduce.admission import fill, receive
from unisono.reduce.packing import NOTHING

LARGEST_HEADER = 2**20
"""Bytes of what is said besides the tensors."""

_SIZES = struct.Struct("<IQ")  # of what is said, and of the tensors


@dataclass(frozen=True, slots=True)
class Letter:
    """What one worker says to another.

    Attributes:
        said: JSON values by name.
        packed: tensors as bytes, see :func:`unisono.reduce.packing.pack`: uint8, 1-D.
    """

    said: Mapping[str, Any] = field(default_factory=dict)
    packed: Tensor = NOTHING


class Line:
    """One connection, on which both sides belong to this generation.

    Args:
        connection: taken over.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, letter: Letter) -> int:
        """Send; returns the number of bytes.

        Raises:
            OSError: the other side is gone, or takes nothing.
        """
        said = json.dumps(dict(letter.said)).encode()
        self._connection.sendall(_SIZES.pack(len(said), letter.packed.numel()) + said)
        if letter.packed.numel():
            self._connection.sendall(letter.packed.numpy().data)
        return _SIZES.size + len(said) + letter.packed.numel()

    def receive(self) -> Letter:
        """Wait for a letter.

        Raises:
            EOFError, OSError: the other side is gone, or says nothing.
            Unreadable: it says what is no letter.
        """
        said, size = _SIZES.unpack(receive(self._connection, _SIZES.size))
        if said > LARGEST_HEADER or size > memory():
            raise Unreadable(f"another worker announces {said} bytes of text and {size} of tensors: that is no letter")
        found = parse_object(receive(self._connection, said))
        packed = torch.empty(size, dtype=torch.uint8) if size else NOTHING
        fill(self._connection, packed.numpy().data)
        return Letter(found, packed)

    def hang_up(self) -> None:
        """Wake whoever reads or writes. From any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connection back."""
        self._connection.close()
