"""Where the coordinator of a job is, what can be asked of it, and what a host is told to take part."""

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
"""In the run folder: where the coordinator listens, as long as there is one."""


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a coordinator, and what it takes to be let in.

    Attributes:
        certificate: the certificate that the coordinator shows, or its issuer's; None if this system trusts it anyway.
    """

    url: str
    token: str = field(repr=False)
    certificate: Path | None = None

    @property
    def context(self) -> ssl.SSLContext | None:
        """What is trusted; None without TLS.

        Raises:
            JobError: the certificate cannot be read.
        """
        try:
            return context_for(self.url, self.certificate)
        except OSError as error:
            raise JobError(f"the certificate {self.certificate} cannot be used: {error}") from error


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a person says about a job's place: its URL, for a job on another host, or its run folder."""

    url: str | None = None
    token_file: Path | None = None
    certificate: Path | None = None
    run_dir: Path | None = None

    @property
    def token(self) -> Path:
        """The file that holds the token.

        Raises:
            JobError: the person has not said which.
        """
        if self.token_file is not None:
            return self.token_file
        if self.url is not None or self.run_dir is None:
            raise JobError(
                "--token-file is missing: a copy of the file 'token' in the job's run folder, that only you can read"
            )
        return token_file(self.run_dir)

    def address(self) -> Address:
        """Where the coordinator listens, and what opens it.

        Raises:
            JobError: there is no such job, or it cannot be reached as it should.
        """
        if self.url is None:
            return address_of(find_run(self.run_dir), self.certificate, self.token_file)
        token = self.token
        return Address(_private(self.url.rstrip("/")), read_token(token), self.certificate)


def find_run(named: Path | None, below: Path = RUNS) -> Path:
    """The run folder of the job that is meant: the named one, or the only one with a coordinator.

    Raises:
        JobError: there is no such job, or there are several; lists them.
    """
    if named is not None:
        return named
    run_dirs = sorted(path.parent for path in below.glob(f"*/{WHERE}"))
    if not run_dirs:
        raise JobError(f"no elastic job runs in {below.absolute()}: name its run folder with --run-dir")
    if len(run_dirs) > 1:
        listed = "".join(f"\n  {path}" for path in run_dirs)
        raise JobError(f"several elastic jobs run: name one with --run-dir{listed}")
    return run_dirs[0]


def address_of(run_dir: Path, certificate: Path | None = None, token: Path | None = None) -> Address:
    """Where the coordinator of a run folder listens, and the token that opens it.

    A certificate or token that is given replaces the one in the run folder.

    Raises:
        JobError: no coordinator runs there, the token cannot be read, or could be read on its way.
    """
    path = run_dir / WHERE
    try:
        url = read_object(path)["url"]
    except FileNotFoundError:
        raise JobError(f"no elastic job runs in {run_dir} (there is no {path.name} in it)") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    its_own = certificate_file(run_dir)
    trusted = certificate or (its_own if its_own.exists() else None)
    return Address(_private(str(url)), read_token(token or token_file(run_dir)), trusted)


def distrusted(address: Address, error: ssl.SSLCertVerificationError) -> JobError:
    """Whoever answers there is not the coordinator, as far as anybody can tell."""
    wanted = f"not the one of {address.certificate}" if address.certificate else "one that this system does not trust"
    cure = "Give --certificate with a copy of 'certificate.pem' from the job's run folder"
    if error.verify_code in _DATES:
        cure = f"Is the clock of this host right? It shows {time.strftime('%Y-%m-%d %H:%M:%S %z')}. " + cure
    return JobError(
        f"the certificate of {address.url} is {wanted} ({error.verify_message}); it was not sent the token. {cure}"
    )


_DATES = {9, 10}
"""OpenSSL's codes for a certificate that is not valid yet, or not any more."""


def _private(url: str) -> str:
    if not is_private(url):
        raise JobError(f"{url}: a coordinator on another host is reached over https, since the token goes there")
    try:
        where = urlsplit(url)
        (where.hostname or "").encode("idna")
        _ = where.port  # looked at only now
    except ValueError as error:
        raise JobError(f"{url} is no address of a coordinator: {error}") from error
    return url


# Asking the coordinator of a job that is under way: how far it is, or for another size.

PATIENCE_S = 10.0

PARTS = {"agents", "excluded", "generation", "largest", "members", "others", "over", "phase", "smallest", "wanted"}
"""Of a status."""

LARGEST_ANSWER = 2**26
"""Bytes: the status of thousands of workers."""


@dataclass(frozen=True, slots=True)
class Control:
    """The requests that a person can make to a coordinator. Most return the job's status after it.

    Raises:
        JobError: by each method: the coordinator refuses; says why.
        LaunchError: by each method: it does not answer.
    """

    address: Address

    def status(self) -> dict[str, Any]:
        """Who takes part, and how far they are."""
        return self._ask("GET", "/status")

    def resize(self, workers: int) -> dict[str, Any]:
        """Another number of workers, from the next step on that it can be."""
        return self._ask("POST", "/resize", {"workers": workers})

    def leave(self, who: str) -> dict[str, Any]:
        """One worker leaves, by its id or rank; or all of an agent, by its id."""
        return self._ask("POST", "/leave", {"who": who})

    def replace(self, who: str) -> dict[str, Any]:
        """One worker leaves, by its id or rank, and another one is started in its place."""
        return self._ask("POST", "/replace", {"who": who})

    def checkpoint(self) -> dict[str, Any]:
        """All write a checkpoint after one of the next steps."""
        return self._ask("POST", "/checkpoint", {})

    def stop(self) -> dict[str, Any]:
        """All leave, with a checkpoint: the job can be started again."""
        return self._ask("POST", "/stop", {})

    def record(self, name: str, first: int, most: int) -> bytes:
        """Some bytes of a file of the coordinator's run folder: what was written down of the job.

        Args:
            name: ``journal.jsonl``, ``metrics.jsonl``, ``job.json`` or ``result.json``.
            first: the number of the first byte.
            most: the largest number of bytes; fewer are the file's end, or that there is none.
        """
        return self._read(f"/record/{name}?first={first}&most={most}")

    def metrics(self) -> str:
        """The figures of the job, as Prometheus scrapes them."""
        return self._read("/metrics").decode()

    def _read(self, path: str) -> bytes:
        status, data = self._answer("GET", path)
        if status != http.client.OK:
            raise JobError(_refusal(status, _object(status, data)))
        return data

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return _understood(*self._answer(method, path, body))

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self.address.token}", "Content-Type": "application/json"}
        try:
            with closing(self._connection()) as connection:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                return answer.status, answer.read(LARGEST_ANSWER)
        except ssl.SSLCertVerificationError as error:
            raise distrusted(self.address, error) from error
        except (OSError, http.client.HTTPException) as error:
            raise LaunchError(
                f"the coordinator at {self.address.url} does not answer ({error}): does the job still run?"
            ) from error

    def _connection(self) -> http.client.HTTPConnection:
        # Not urllib: it would go by the proxies of the environment, and this is the job's own business.
        where = urlsplit(self.address.url)
        host, port = where.hostname or "", where.port
        context: ssl.SSLContext | None = self.address.context
        if context is None:
            return http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
        return http.client.HTTPSConnection(host, port, timeout=PATIENCE_S, context=context)


def _object(status: int, text: bytes) -> dict[str, Any]:
    try:
        return parse_object(text)
    except Unreadable as error:
        raise LaunchError(f"the coordinator gave an answer ({status}) that is no JSON object") from error


def _refusal(status: int, found: Mapping[str, Any]) -> str:
    return str(found.get("error", f"the coordinator refuses ({status})"))


def _understood(status: int, text: bytes) -> dict[str, Any]:
    answer = _object(status, text)
    if status >= 400:
        raise JobError(_refusal(status, answer))
    if not answer.keys() >= PARTS:
        raise LaunchError(
            "what answers there is no coordinator of this version of Unisono: it tells no status of a job"
        )
    return answer


# What the agent of a host is told on its standard input, which nobody else can read.


def new_agent() -> str:
    """An id that no other agent has."""
    return f"agent-{secrets.token_hex(8)}"


LONGEST = 2**22
"""Bytes of a line: names of files, arguments and variables."""


@dataclass(frozen=True, slots=True)
class HostOrder:
    """All that a host needs to join a job. It travels on the standard input, which nobody else can read.

    Attributes:
        is_seen_from_there: whether the host takes the launcher's address, as it sees it, for that in the URL.
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
        """The line of JSON that travels."""
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
            connection: what sshd says of the connection there (``SSH_CONNECTION``): the launcher's address comes first.
        """
        seen = connection.split(" ")[0].partition("%")[0]
        if not self.is_seen_from_there or not seen:
            return self.url
        return f"https://{f'[{seen}]' if ':' in seen else seen}:{urlsplit(self.url).port}"


MARK = "unisono-host "
"""How the hello of a host begins. What comes before it is a greeting of its shell."""


def version() -> str:
    """The version of Unisono on this host."""
    return str(sys.modules["unisono"].__version__)


@dataclass(frozen=True, slots=True)
class HostHello:
    """The first word of a host: whom the launcher reaches there."""

    version: str
    python: str

    @classmethod
    def of_this_host(cls) -> "HostHello":
        """That of this process."""
        return cls(version(), platform.python_version())

    def to_line(self) -> str:
        """The line of JSON that travels."""
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
        """Why this host cannot work with that one; empty if it can."""
        if self.version == version():
            return ""
        return (
            f"it has Unisono {short(self.version)}, and this host {version()}: install the same version on "
            f"all hosts, or name another interpreter with --python"
        )
