"""What a launcher asks of the fork server: one worker."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from unisono.received import parse_json, value_of

FIRST_KEPT = 3
"""The number that a descriptor has in the worker, if one comes behind those of its output and its errors."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A worker that is asked for. The descriptors of its output and errors travel beside it, and maybe a third.

    Attributes:
        argv: the script and its arguments, as ``unisono.launch.worker`` takes them.
        variables: what it gets on top of the fork server's own environment.
        cwd: its working folder.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    cwd: str

    def to_json(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "WorkerRequest":
        """The inverse of ``to_json``.

        Raises:
            Unreadable: it is none.
        """
        found: WorkerRequest = value_of(cls, parse_json(data), "the request")
        return found
