"""Asking the coordinator of a job that is under way: how far it is, or for another size."""

import http.client
import json
import ssl
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from unisono.errors import JobError, LaunchError, Unreadable
from unisono.launch.elastic.address import Address, distrusted
from unisono.received import parse_object

PATIENCE_S = 10.0

PARTS = {"agents", "excluded", "generation", "largest", "members", "others", "over", "phase", "smallest", "wanted"}
"""Of a status."""

LARGEST_ANSWER = 2**26
"""Bytes: the status of thousands of workers."""


@dataclass(frozen=True, slots=True)
class Control:
    """What a person can ask of a coordinator. Each answer is the job's status after it.

    Attributes:
        address: of the coordinator.

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

    def stop(self) -> dict[str, Any]:
        """All leave, with a checkpoint: the job can be started again."""
        return self._ask("POST", "/stop", {})

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.address.token}", "Content-Type": "application/json"}
        try:
            with closing(self._connection()) as connection:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                status, text = answer.status, answer.read(LARGEST_ANSWER)
        except ssl.SSLCertVerificationError as error:
            raise distrusted(self.address, error) from error
        except (OSError, http.client.HTTPException) as error:
            raise LaunchError(
                f"the coordinator at {self.address.url} does not answer ({error}): does the job still run?"
            ) from error
        return _understood(status, text)

    def _connection(self) -> http.client.HTTPConnection:
        # Not urllib: it would go by the proxies of the environment, and this is the job's own business.
        where = urlsplit(self.address.url)
        host, port = where.hostname or "", where.port
        context: ssl.SSLContext | None = self.address.context
        if context is None:
            return http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
        return http.client.HTTPSConnection(host, port, timeout=PATIENCE_S, context=context)


def _understood(status: int, text: bytes) -> dict[str, Any]:
    try:
        found = parse_object(text)
    except Unreadable as error:
        raise LaunchError(f"the coordinator gave an answer ({status}) that is no JSON object") from error
    if status >= 400:
        raise JobError(str(found.get("error", f"the coordinator refuses ({status})")))
    if not found.keys() >= PARTS:
        raise LaunchError(
            "what answers there is no coordinator of this version of Unisono: it tells no status of a job"
        )
    return found
