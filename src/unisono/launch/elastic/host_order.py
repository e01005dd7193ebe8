"""What the agent of a host is told on its standard input, which nobody else can read."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

from unisono.received import parse_json, value_of

LONGEST = 2**22
"""Bytes of a line: names of files, arguments and variables."""


@dataclass(frozen=True, slots=True)
class HostOrder:
    """All that a host needs to join a job. It travels on the standard input, which nobody else can read.

    Attributes:
        url: the coordinator's URL.
        is_seen_from_there: whether the host takes the launcher's address, as it sees it, for that in the URL.
        token: the job's token.
        certificate: the coordinator's certificate, PEM.
        folder: the working folder.
        agent: the id of the host's agent.
        words: the options of ``unisono join``, the script, and its arguments.
        environment: further variables.
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
        """As it travels."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "HostOrder":
        """The inverse of ``to_line``.

        Raises:
            Unreadable: it is no order.
        """
        found: HostOrder = value_of(cls, parse_json(line, LONGEST), "the order")
        return found

    def url_from(self, connection: str) -> str:
        """The coordinator's URL for a host.

        Args:
            connection: what sshd says of the connection there (``SSH_CONNECTION``): the launcher's address comes first.
        """
        seen = connection.split(" ")[0].partition("%")[0]
        if not self.is_seen_from_there or not seen:
            return self.url
        return f"https://{f'[{seen}]' if ':' in seen else seen}:{urlsplit(self.url).port}"
