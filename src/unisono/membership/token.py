"""The job's token: who has it may take part, and nobody else."""

import ipaddress
import os
import re
import secrets
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from unisono.errors import JobError
from unisono.host.certificate import PINNED

# Whom workers, agents and people believe to be the coordinator, before they show it the job's token.


def is_private(url: str) -> bool:
    """Whether nobody can read a token that is sent there: over TLS, or without leaving this host."""
    try:
        parts = urlsplit(url)
        return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    except ValueError:  # an address that is none
        return False


def is_loopback(host: str) -> bool:
    """Whether a name or address is this host's own, whatever a name server says."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def context_for(url: str, certificate: Path | None) -> ssl.SSLContext | None:
    """What is trusted; None without TLS.

    A certificate that can vouch for no other one is pinned: whoever shows it and has its key is the coordinator, by
    whatever name or address it was reached, and whatever the clocks say. Any other has to be made out for the name in
    the URL.

    Args:
        url: the coordinator's URL.
        certificate: a file with the coordinator's certificate, or with those of who may vouch for it, PEM; None for
            those that this system trusts.

    Raises:
        OSError: the file cannot be read, or holds no certificate.
    """
    if not url.startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=certificate)
    if certificate is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        counts = context.cert_store_stats()
        if (counts["x509"], counts["x509_ca"]) == (1, 0):
            context.check_hostname = False
            context.verify_flags |= PINNED
    return context


REFUSED = 401
"""The status of a request without this token."""

OUTDATED = (
    "the job's token is missing or wrong: each start of a job makes a new one, the file 'token' in its run folder"
)

GROUP, EVERYBODY = 0o070, 0o007

LARGEST = 256
"""Bytes of a token's file."""

_FORM = re.compile(r"[A-Za-z0-9_-]{43}")  # 256 bits
_OPEN_ONLY_ITSELF = os.O_CLOEXEC | os.O_NOFOLLOW  # a link that somebody else put there leads nowhere


def token_file(run_folder: Path) -> Path:
    """Where a run folder keeps its token."""
    return run_folder / "token"


def make_token(run_folder: Path) -> str:
    """The token of a run folder; a new one if it has none yet.

    Raises:
        JobError: it cannot be read or written, or others can read it.
    """
    path = token_file(run_folder)
    with _written(run_folder) as beside, suppress(FileExistsError):  # whoever was first has made it for all
        os.link(beside, path)
    return read_token(path)


def new_token(run_folder: Path, token: str | None = None) -> str:
    """Another token for a run folder: who has the one before does not take part in what starts now.

    Raises:
        JobError: it cannot be written.
    """
    path = token_file(run_folder)
    with _written(run_folder, token) as beside:
        beside.replace(path)
    return read_token(path)


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        JobError: it cannot be read, is none, or others than its owner can read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN_ONLY_ITSELF)  # a pipe is not waited for
        with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            mode, is_shared = status.st_mode, status.st_uid == 0 != os.geteuid()  # by root, who knows the group
            token = file.read(LARGEST + 1).strip() if stat.S_ISREG(mode) and status.st_size <= LARGEST else ""
    except OSError as error:
        raise JobError(f"the token of the job cannot be read: {error}") from error
    if mode & (EVERYBODY if is_shared else EVERYBODY | GROUP):
        raise JobError(f"others can read the token in {path}: chmod 600 it, or remove it and start the job again")
    if not _FORM.fullmatch(token):
        raise JobError(f"{path} holds no token: remove it and start the job again")
    return token


def fresh_token() -> str:
    """A token that nobody has had."""
    return secrets.token_urlsafe(32)


@contextmanager
def _written(run_folder: Path, token: str | None = None) -> Iterator[Path]:
    """A file with a token, until the block ends: by default one that nobody has had."""
    beside = run_folder / f".token.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_ONLY_ITSELF, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(token or fresh_token())
                file.flush()
                os.fsync(file.fileno())
            yield beside
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise JobError(f"no token can be made in {run_folder}: {error}") from error
