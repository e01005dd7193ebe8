"""The job's token, which all who take part need, and how they recognise the coordinator before they send it."""

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

# How workers, agents and commands recognise the coordinator before they send it the job's token.


def is_private(url: str) -> bool:
    """Whether no other can read a token that is sent to this URL: it is sent over TLS, or does not leave this host."""
    try:
        parts = urlsplit(url)
        return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    except ValueError:  # the text is no URL
        return False


def is_loopback(host: str) -> bool:
    """Whether a name or address is this host's own, whatever a name server says."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def context_for(url: str, certificate: Path | None) -> ssl.SSLContext | None:
    """The TLS context with the trusted certificates; None without TLS.

    A single certificate that is no certificate authority's is pinned: a server that has it and its key is the
    coordinator, whatever the name or address in the URL, and whatever the clocks say. With any other, the server's
    certificate has to be made out for the name in the URL.

    Args:
        url: the coordinator's URL.
        certificate: a PEM file with the coordinator's certificate, or with those of certificate authorities; None for
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
"""The status code for a request without this token."""

OUTDATED = (
    "the job's token is missing or wrong: each start of a job makes a new one, the file 'token' in its run folder"
)

GROUP, EVERYBODY = 0o070, 0o007

LARGEST = 256
"""The most bytes of a token's file."""

_FORM = re.compile(r"[A-Za-z0-9_-]{43}")  # 256 bits
_OPEN_ONLY_ITSELF = os.O_CLOEXEC | os.O_NOFOLLOW  # a link, which another user may have put there, is not followed


def token_file(run_folder: Path) -> Path:
    """The path of a run folder's token."""
    return run_folder / "token"


def make_token(run_folder: Path) -> str:
    """The token of a run folder; a new one if it has none yet.

    Raises:
        JobError: it cannot be read or written, or others can read it.
    """
    path = token_file(run_folder)
    # A link is made only if there is no token: of several processes, the first one makes it for all.
    with _temporary_file(run_folder) as temporary, suppress(FileExistsError):
        os.link(temporary, path)
    return read_token(path)


def new_token(run_folder: Path, token: str | None = None) -> str:
    """Replace the token of a run folder, by a fresh one by default: processes with the old one take part no more.

    Raises:
        JobError: it cannot be written.
    """
    path = token_file(run_folder)
    with _temporary_file(run_folder, token) as temporary:
        temporary.replace(path)
    return read_token(path)


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        JobError: it cannot be read, is no token, or others than its owner can read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN_ONLY_ITSELF)  # without waiting for a pipe
        with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            # A file of root's that this user can read is meant for its group (a mounted Secret, say).
            mode, is_shared = status.st_mode, status.st_uid == 0 != os.geteuid()
            token = file.read(LARGEST + 1).strip() if stat.S_ISREG(mode) and status.st_size <= LARGEST else ""
    except OSError as error:
        raise JobError(f"the token of the job cannot be read: {error}") from error
    if mode & (EVERYBODY if is_shared else EVERYBODY | GROUP):
        raise JobError(f"others can read the token in {path}: chmod 600 it, or remove it and start the job again")
    if not _FORM.fullmatch(token):
        raise JobError(f"{path} holds no token: remove it and start the job again")
    return token


def fresh_token() -> str:
    """A new random token."""
    return secrets.token_urlsafe(32)


@contextmanager
def _temporary_file(run_folder: Path, token: str | None = None) -> Iterator[Path]:
    """A temporary file with a token, a fresh one by default; it is gone when the block ends, unless it was moved."""
    temporary = run_folder / f".token.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_ONLY_ITSELF, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(token or fresh_token())
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise JobError(f"no token can be made in {run_folder}: {error}") from error
