"""Which processes this one can see: those of one origin can look for each other by their numbers."""

import socket
from functools import cache
from hashlib import sha256
from pathlib import Path


@cache
def origin() -> str:
    """16 hex digits that stand for this host's kernel since it was started, and a namespace of process numbers in it.

    Containers may have one hostname, and processes in them one number: neither says who is meant.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return mark_of(kernel, Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:  # then the host's name has to do
        return mark_of(socket.gethostname(), 0)


def mark_of(kernel: str, namespace: int) -> str:
    """Other for every other kernel, start of it, and namespace."""
    return sha256(f"{kernel} {namespace}".encode()).hexdigest()[:16]
