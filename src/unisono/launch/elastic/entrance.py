"""The address at which a job's coordinator can be reached, as given on the command line."""

import errno
import os
import re
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.errors import JobError
from unisono.host.certificate import Certificate, NoCertificate, alternative_names, make
from unisono.membership.token import is_loopback, new_token, read_token
from unisono.received import short

# The certificate that a coordinator shows to other hosts: the person's own, or one that is made for the job.

END = "-----END CERTIFICATE-----"


def certificate_file(run_dir: Path) -> Path:
    """Where a run folder keeps the certificate of its coordinator, for others to copy."""
    return run_dir / "certificate.pem"


def share(certificate: Certificate, run_dir: Path) -> None:
    """Put the certificate, without what is above it and without its key, where it is looked for.

    Raises:
        JobError: it cannot be read, or is none.
    """
    try:
        text = certificate.chain.read_text(encoding="ascii")
        first, end, _ = text.partition(END)
        if not end:
            raise JobError(f"--tls-cert {certificate.chain} holds no certificate")
        certificate_file(run_dir).write_text(f"{first}{end}\n", encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"--tls-cert {certificate.chain} cannot be used: {error}") from error


def make_certificate(run_dir: Path, names: Iterable[str]) -> Certificate:
    """The run folder's own certificate, signed by itself; a new one if it has none yet.

    Args:
        run_dir: the run folder.
        names: names and addresses of this host, for programs that want to see them in it.

    Raises:
        JobError: there is nothing here that makes one, or it could not; says what to do.
    """
    made = Certificate(certificate_file(run_dir), run_dir / "certificate.key")
    if made.chain.exists() and made.key.exists():
        if made.key.stat().st_mode & 0o077:
            raise JobError(f"others can read the key in {made.key}: remove it, and another one is made")
        return made
    try:
        with tempfile.TemporaryDirectory(prefix=".certificate-", dir=run_dir) as beside:  # nobody else looks into it
            fresh = make(
                Path(beside), "unisono coordinator", ["extendedKeyUsage = serverAuth", alternative_names(names)]
            )
            os.replace(fresh.key, made.key)  # noqa: PTH105 (both as one)
            os.replace(fresh.chain, made.chain)  # noqa: PTH105
    except (OSError, NoCertificate) as error:
        raise JobError(
            f"other hosts reach the coordinator over TLS, and {error}: install openssl, or give --tls-cert and "
            f"--tls-key"
        ) from error
    return made


# Where the coordinator of a job can be reached, as the person says it.

LOOPBACK = "127.0.0.1"

HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for examples. Nothing is sent there: the system is asked from which of ours it would be."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """The address at which a coordinator listens, with its certificate.

    Attributes:
        host: a name or address of this host; empty for all of them.
        port: 0 for any that is free.
        certificate: the person's own; None for one that is made for the job.
        towards: a host from which others call, if one is known: which of several addresses others are told.
        token_file: a file with the job's token, if somebody has made that beforehand.
        known_as: the name by which others know this host, if it is not ``host``; maybe no name server knows it yet.
    """

    host: str = LOOPBACK
    port: int = 0
    certificate: Certificate | None = None
    towards: str = ""
    token_file: Path | None = None
    known_as: str = ""

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

    def made_before(self, token_file: Path | None, known_as: str | None) -> "Entrance":
        """The same for a host of which name and token were known before it was there.

        Raises:
            JobError: only this host can reach it, or the name is none.
        """
        if token_file is None and known_as is None:
            return self
        if self.is_local:
            raise JobError("--token-file and --known-as are for a coordinator that other hosts reach: --coordinator")
        if known_as is not None and not HOST_NAME.fullmatch(known_as):
            raise JobError(f"--known-as {short(known_as)}: write the name of a host, without a port")
        return replace(self, token_file=token_file, known_as=known_as or "")

    def token(self, run_dir: Path) -> str:
        """The job's token, which the run folder keeps from now on.

        Raises:
            JobError: it cannot be read or written.
        """
        return new_token(run_dir, None if self.token_file is None else read_token(self.token_file))

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
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            free = f"[{self.host}]:0" if ":" in self.host else f"{self.host}:0"
            raise JobError(
                f"the coordinator cannot listen on {self.host or 'all addresses'}, port {self.port}: {error}. "
                + (
                    f"Something else listens there, another job perhaps: --coordinator {free} takes a free port"
                    if is_taken
                    else "--coordinator wants a name or address of this host, or :PORT for all of them"
                )
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
        if self.known_as or self.host:
            return self.known_as or self.host
        for host in filter(None, (self.towards, _ELSEWHERE[listening.family])):
            with suppress(OSError, UnicodeError), socket.socket(listening.family, socket.SOCK_DGRAM) as asked:
                asked.connect((host, 9))
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
