"""Where the coordinator of a job can be reached, as the person says it."""

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import JobError
from unisono.launch.elastic.certificate import Certificate, make_certificate, share
from unisono.membership.trust import is_loopback

LOOPBACK = "127.0.0.1"

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for examples. Nothing is sent there: the system is asked from which of ours it would be."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where a coordinator listens.

    Attributes:
        host: a name or address of this host; empty for all of them.
        port: 0 for any that is free.
        certificate: the person's own; None for one that is made for the job.
    """

    host: str = LOOPBACK
    port: int = 0
    certificate: Certificate | None = None

    @classmethod
    def read(cls, text: str | None, chain: Path | None = None, key: Path | None = None) -> "Entrance":
        """``HOST:PORT``, ``:PORT`` or ``[ADDRESS]:PORT``; on loopback unless said otherwise.

        Raises:
            JobError: it is none of these, or there is no use for the certificate.
        """
        if (chain is None) != (key is None):
            raise JobError("--tls-cert and --tls-key belong together: give both, or none")
        if text is None:
            if chain is not None:
                raise JobError("--tls-cert is for a coordinator that other hosts reach: say where with --coordinator")
            return cls()
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise JobError(f"--coordinator {text}: write an address with colons in brackets, as [{host}]:7777")
        if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
            raise JobError(f"--coordinator {text}: write HOST:PORT, or :PORT for all addresses of this host")
        return cls(host, int(port), Certificate(chain, key) if chain is not None and key is not None else None)

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        return self.host != "" and is_loopback(self.host)

    def listen(self, backlog: int) -> socket.socket:
        """A listening socket.

        Raises:
            JobError: there is none to be had; says what to do.
        """
        try:
            where: tuple[Any, ...] = ("", self.port)
            family = socket.AF_INET
            if self.host:
                family, _, _, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(where[:2], family=family, backlog=backlog)
        except (OSError, UnicodeError) as error:  # a name with a part of more than 63 characters is a UnicodeError
            raise JobError(
                f"the coordinator cannot listen on {self.host or 'all addresses'}, port {self.port}: {error}. "
                f"--coordinator wants a name or address of this host, or :PORT for all of them"
            ) from error
        bound = listening.getsockname()[0]
        if not self.is_local and is_loopback(bound):
            listening.close()
            raise JobError(
                f"--coordinator {self.host}: on this host that is {bound}, which no other host can reach; give the "
                f"address by which the others know it, or :{self.port or 'PORT'} for all of them"
            )
        return listening

    def name(self, listening: socket.socket) -> str:
        """The name or address that clients are told."""
        if self.host:
            return self.host
        with suppress(OSError), socket.socket(listening.family, socket.SOCK_DGRAM) as asked:
            asked.connect((_ELSEWHERE[listening.family], 9))
            return str(asked.getsockname()[0])
        return socket.getfqdn()

    def secured(self, run_dir: Path, name: str) -> Certificate | None:
        """What the coordinator shows to those who connect; None where it is not needed: only this host can reach it.

        Raises:
            JobError: there is no certificate, and none can be made.
        """
        if self.certificate is not None:
            share(self.certificate, run_dir)
            return self.certificate
        if self.is_local:
            return None
        return make_certificate(run_dir, dict.fromkeys((name, socket.gethostname())))
