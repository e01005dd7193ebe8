"""Who is at the other end of a Unix socket, by the word of the kernel."""

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this one, whoever has called and whoever answers."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return bool(user == os.geteuid())
