"""The address of a job's coordinator, and the choice of the job."""

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unisono.errors import JobError, LaunchError, Unreadable
from unisono.launch.elastic.entrance import certificate_file
from unisono.launch.ending.result import RUNS
from unisono.membership.token import context_for, is_private, read_token, token_file
from unisono.received import parse_object, read_object

WHERE = "coordinator.json"
"""In the run folder: where the coordinator listens, as long as there is one."""


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a coordinator, and what it takes to be let in.

    Attributes:
        url: the coordinator's URL, such as ``http://127.0.0.1:4711``.
        token: the job's token.
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
    """What a person says about a job's place: its URL, for a job on another host, or its run folder.

    Attributes:
        url: the coordinator's URL, if given.
        token_file: the file with the job's token, if given.
        certificate: the certificate to trust, as in :class:`Address`.
        run_dir: the run folder.
    """

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

    Args:
        named: the run folder that the person has named, if any.
        below: the folder in which to look otherwise.

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


def address_of(run_dir: Path, certificate: Path | None = None, token: Path | None = None) -> Address:
    """Where the coordinator of a run folder listens, and the token that opens it.

    Args:
        run_dir: the run folder.
        certificate: the certificate to trust, if it is not the one in the run folder.
        token: the file with the token, if it is not the one in the run folder.

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

    Attributes:
        address: the coordinator's address.

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
    found = _object(status, text)
    if status >= 400:
        raise JobError(_refusal(status, found))
    if not found.keys() >= PARTS:
        raise LaunchError(
            "what answers there is no coordinator of this version of Unisono: it tells no status of a job"
        )
    return found
