"""The address of a job's coordinator, the requests that it answers, and the order that a host gets to take part."""

import http.client
import json
import platform
import secrets
import ssl
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unisono.errors import JobError, LaunchError, Unreadable
from unisono.launch.elastic.elastic_settings import certificate_file
from unisono.launch.outcome import RUNS
from unisono.membership.token import context_for, is_private, read_token, token_file
from unisono.received import parse_json, parse_object, read_object, short, value_of

WHERE = "coordinator.json"
"""The file in the run folder with the coordinator's address, as long as the coordinator runs."""


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a coordinator, its token, and its certificate.

    Attributes:
        certificate: the certificate of the coordinator, or of its issuer; None if this system trusts it anyway.
    """

    url: str
    token: str = field(repr=False)
    certificate: Path | None = None

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context that trusts the certificate; None without TLS.

        Raises:
            JobError: the certificate cannot be read.
        """
        try:
            return context_for(self.url, self.certificate)
        except OSError as error:
            raise JobError(f"the certificate {self.certificate} cannot be used: {error}") from error


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The options with which a person names a job: its URL, for a job on another host, or its run folder."""

    url: str | None = None
    token_file: Path | None = None
    certificate: Path | None = None
    run_dir: Path | None = None

    @property
    def token(self) -> Path:
        """The file that holds the token.

        Raises:
            JobError: the person has not named it.
        """
        if self.token_file is not None:
            return self.token_file
        if self.url is not None or self.run_dir is None:
            raise JobError(
                "--token-file is missing: a copy of the file 'token' in the job's run folder, that only you can read"
            )
        return token_file(self.run_dir)

    def address(self) -> Address:
        """The address of the coordinator.

        Raises:
            JobError: there is no such job, or its URL would send the token without encryption.
        """
        if self.url is None:
            return address_of(find_run(self.run_dir), self.certificate, self.token_file)
        token = self.token
        return Address(_require_private(self.url.rstrip("/")), read_token(token), self.certificate)


def find_run(run_dir: Path | None, below: Path = RUNS) -> Path:
    """The named run folder, or the only one below a folder that has a coordinator.

    Raises:
        JobError: no elastic job runs there, or several do; lists them.
    """
    if run_dir is not None:
        return run_dir
    run_dirs = sorted(path.parent for path in below.glob(f"*/{WHERE}"))
    if not run_dirs:
        raise JobError(f"no elastic job runs in {below.absolute()}: name its run folder with --run-dir")
    if len(run_dirs) > 1:
        listed = "".join(f"\n  {path}" for path in run_dirs)
        raise JobError(f"several elastic jobs run: name one with --run-dir{listed}")
    return run_dirs[0]


def address_of(run_dir: Path, certificate: Path | None = None, token: Path | None = None) -> Address:
    """The address of the coordinator of a run folder.

    A certificate or token in the arguments replaces the one in the run folder.

    Raises:
        JobError: no coordinator runs there, or the token cannot be read, or would be sent without encryption.
    """
    path = run_dir / WHERE
    try:
        url = read_object(path)["url"]
    except FileNotFoundError:
        raise JobError(f"no elastic job runs in {run_dir} (there is no {path.name} in it)") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    own = certificate_file(run_dir)
    trusted = certificate or (own if own.exists() else None)
    return Address(_require_private(str(url)), read_token(token or token_file(run_dir)), trusted)


def distrusted(address: Address, error: ssl.SSLCertVerificationError) -> JobError:
    """The error for a server whose certificate shows no proof that it is the coordinator."""
    reason = f"not the one of {address.certificate}" if address.certificate else "one that this system does not trust"
    advice = "Give --certificate with a copy of 'certificate.pem' from the job's run folder"
    if error.verify_code in _DATES:
        advice = f"Is the clock of this host right? It shows {time.strftime('%Y-%m-%d %H:%M:%S %z')}. " + advice
    return JobError(
        f"the certificate of {address.url} is {reason} ({error.verify_message}); it was not sent the token. {advice}"
    )


_DATES = {9, 10}
"""OpenSSL's codes for a certificate that is not valid yet, or not any more."""


def _require_private(url: str) -> str:
    if not is_private(url):
        raise JobError(f"{url}: a coordinator on another host is reached over https, since the token goes there")
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        _ = parts.port  # raises for a wrong port, which urlsplit accepts
    except ValueError as error:
        raise JobError(f"{url} is no address of a coordinator: {error}") from error
    return url


# Requests to the coordinator of a job that is under way: for its status, or for another number of workers.

TIMEOUT_S = 10.0

STATUS_KEYS = {
    *("agents", "excluded", "generation", "largest", "members", "others", "over", "phase", "smallest", "wanted"),
}
"""The keys that every status has."""

LARGEST_REPLY = 2**26
"""The most bytes of a reply: the status of thousands of workers."""


@dataclass(frozen=True, slots=True)
class Control:
    """The requests that a person can make to a coordinator. Most return the status of the job after the request.

    Raises:
        JobError: by each method: the coordinator refuses; says why.
        LaunchError: by each method: it does not answer.
    """

    address: Address

    def status(self) -> dict[str, Any]:
        """The workers that take part, and how far they are."""
        return self._request_status("GET", "/status")

    def resize(self, workers: int) -> dict[str, Any]:
        """Set another number of workers, from the next step on at which that is possible."""
        return self._request_status("POST", "/resize", {"workers": workers})

    def leave(self, who: str) -> dict[str, Any]:
        """Have one worker leave, by its id or rank; or all workers of an agent, by its id."""
        return self._request_status("POST", "/leave", {"who": who})

    def replace(self, who: str) -> dict[str, Any]:
        """Have one worker leave, by its id or rank, and another one start in its place."""
        return self._request_status("POST", "/replace", {"who": who})

    def checkpoint(self) -> dict[str, Any]:
        """Have a checkpoint written after one of the next steps."""
        return self._request_status("POST", "/checkpoint", {})

    def stop(self) -> dict[str, Any]:
        """Have all workers leave with a checkpoint, from which the job can be started again."""
        return self._request_status("POST", "/stop", {})

    def record(self, name: str, first: int, most: int) -> bytes:
        """Some bytes of a file of the coordinator's run folder.

        Args:
            name: ``journal.jsonl``, ``metrics.jsonl``, ``job.json`` or ``result.json``.
            first: the number of the first byte.
            most: the largest number of bytes. Fewer mean the end of the file, or that there is no such file.
        """
        return self._read(f"/record/{name}?first={first}&most={most}")

    def metrics(self) -> str:
        """The figures of the job, as Prometheus scrapes them."""
        return self._read("/metrics").decode()

    def _read(self, path: str) -> bytes:
        code, data = self._request("GET", path)
        if code != http.client.OK:
            raise JobError(_refusal(code, _object(code, data)))
        return data

    def _request_status(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return _read_status(*self._request(method, path, body))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self.address.token}", "Content-Type": "application/json"}
        try:
            with closing(self._connection()) as connection:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                reply = connection.getresponse()
                return reply.status, reply.read(LARGEST_REPLY)
        except ssl.SSLCertVerificationError as error:
            raise distrusted(self.address, error) from error
        except (OSError, http.client.HTTPException) as error:
            raise LaunchError(
                f"the coordinator at {self.address.url} does not answer ({error}): does the job still run?"
            ) from error

    def _connection(self) -> http.client.HTTPConnection:
        # Not urllib, which would send the token through the proxies of the environment.
        url = urlsplit(self.address.url)
        host, port = url.hostname or "", url.port
        context: ssl.SSLContext | None = self.address.context
        if context is None:
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


def _object(code: int, text: bytes) -> dict[str, Any]:
    try:
        return parse_object(text)
    except Unreadable as error:
        raise LaunchError(f"the coordinator gave an answer ({code}) that is no JSON object") from error


def _refusal(code: int, reply: Mapping[str, Any]) -> str:
    return str(reply.get("error", f"the coordinator refuses ({code})"))


def _read_status(code: int, text: bytes) -> dict[str, Any]:
    reply = _object(code, text)
    if code >= 400:
        raise JobError(_refusal(code, reply))
    if not reply.keys() >= STATUS_KEYS:
        raise LaunchError("the server there is no coordinator of this version of Unisono: it sends no status of a job")
    return reply


# The order that the agent of a host reads from its standard input, which no other process can read.


def new_agent() -> str:
    """An id that no other agent has."""
    return f"agent-{secrets.token_hex(8)}"


LONGEST = 2**22
"""The most bytes of a line with names of files, arguments and variables."""


@dataclass(frozen=True, slots=True)
class HostOrder:
    """All that a host needs to join a job. It travels on the standard input of the agent, since it holds the token.

    Attributes:
        is_seen_from_there: whether the host replaces the address in the URL by that of the launcher, as it sees it.
        certificate: the coordinator's certificate, PEM.
        words: the options of ``unisono join``, the script, and its arguments.
    """

    url: str
    is_seen_from_there: bool
    token: str = field(repr=False)
    certificate: str
    folder: str
    agent: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def to_line(self) -> bytes:
        """The order as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "HostOrder":
        """The inverse of ``to_line``.

        Raises:
            Unreadable: it is no order.
        """
        value: HostOrder = value_of(cls, parse_json(line, LONGEST), "the order")
        return value

    def url_from(self, connection: str) -> str:
        """The coordinator's URL for a host.

        Args:
            connection: sshd's variable ``SSH_CONNECTION`` on the host, whose first word is the launcher's address.
        """
        seen = connection.split(" ")[0].partition("%")[0]
        if not self.is_seen_from_there or not seen:
            return self.url
        return f"https://{f'[{seen}]' if ':' in seen else seen}:{urlsplit(self.url).port}"


MARK = "unisono-host "
"""The beginning of a host's hello. Lines before it are a greeting of the host's shell."""


def version() -> str:
    """The version of Unisono on this host."""
    return str(sys.modules["unisono"].__version__)


@dataclass(frozen=True, slots=True)
class HostHello:
    """The first line of a host's agent: the versions of Unisono and Python there."""

    version: str
    python: str

    @classmethod
    def of_this_host(cls) -> "HostHello":
        """The hello of this process."""
        return cls(version(), platform.python_version())

    def to_line(self) -> str:
        """The hello as a line of JSON after the mark."""
        return MARK + json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> "HostHello | None":
        """The inverse of ``to_line``; None for any other line."""
        if not line.startswith(MARK):
            return None
        try:
            value: HostHello = value_of(cls, parse_json(line.removeprefix(MARK), LONGEST), "its hello")
        except Unreadable:
            return None
        return value

    def obstacle(self) -> str:
        """Why the launcher's host cannot work with that one; empty if it can."""
        if self.version == version():
            return ""
        return (
            f"it has Unisono {short(self.version)}, and this host {version()}: install the same version on "
            f"all hosts, or name another interpreter with --python"
        )
