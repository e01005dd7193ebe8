"""Where the coordinator of a job is, and which job is meant."""

import ipaddress
import json
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from unisono.errors import JobError
from unisono.launch.result import RUNS
from unisono.membership.token import read_token, token_file

WHERE = "coordinator.json"
"""In the run folder: where the coordinator listens, as long as there is one."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the coordinator is.

    Attributes:
        url: as ``http://127.0.0.1:4711``.
        token: of the job.
        certificate: that it shows, if it speaks TLS with one of its own.
    """

    url: str
    token: str = field(repr=False)
    certificate: Path | None = None

    @property
    def context(self) -> ssl.SSLContext | None:
        """What is trusted; None without TLS."""
        if not self.url.startswith("https:"):
            return None
        return ssl.create_default_context(cafile=str(self.certificate) if self.certificate else None)


def find_run(named: Path | None, below: Path = RUNS) -> Path:
    """The run folder of the job that is meant: the named one, or the only one with a coordinator.

    Args:
        named: by the person, if any.
        below: where to look otherwise.

    Raises:
        JobError: there is no such job, or there are several; lists them.
    """
    if named is not None:
        return named
    found = sorted(path.parent for path in below.glob(f"*/{WHERE}"))
    if not found:
        raise JobError(f"no elastic job runs in {below.absolute()}: name its run folder with --run-dir")
    if len(found) > 1:
        listed = "".join(f"\n  {path}" for path in found)
        raise JobError(f"several elastic jobs run: name one with --run-dir{listed}")
    return found[0]


def address_of(run_dir: Path, certificate: Path | None = None) -> Address:
    """Where the coordinator of a run folder listens, and the token that opens it.

    Args:
        run_dir: the run folder.
        certificate: to trust, for a coordinator with TLS and a certificate of its own.

    Raises:
        JobError: no coordinator runs there, the token cannot be read, or could be read on its way.
    """
    path = run_dir / WHERE
    try:
        url = json.loads(path.read_bytes())["url"]
    except FileNotFoundError:
        raise JobError(f"no elastic job runs in {run_dir} (there is no {path.name} in it)") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    return Address(_private(str(url)), read_token(token_file(run_dir)), certificate)


def _private(url: str) -> str:
    found = urlsplit(url)
    if found.scheme == "https" or (found.scheme == "http" and _is_loopback(found.hostname or "")):
        return url
    raise JobError(f"{url}: a coordinator on another host is reached over https, since the token goes there")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
