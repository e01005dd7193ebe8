"""What a launcher asks of the template: one worker."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from unisono.errors import Unreadable
from unisono.received import is_text, parse_json

FIRST_KEPT = 3
"""The number that a descriptor has in the worker, if one comes behind those of its output and its errors."""


@dataclass(frozen=True, slots=True)
class Request:
    """A worker that is asked for. The descriptors of its output and errors travel beside it, and maybe a third.

    Attributes:
        argv: the script and its arguments, as ``unisono.launch.worker`` takes them.
        variables: what it gets on top of the template's own environment.
        cwd: its working folder.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    cwd: str

    def to_json(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Request":
        """The inverse of ``to_json``.

        Raises:
            Unreadable: it is none.
        """
        match parse_json(data):
            case {"argv": [*argv], "variables": variables, "cwd": str(cwd)} if is_text(variables):
                if all(isinstance(each, str) for each in argv):
                    return cls(tuple(argv), variables, cwd)
        raise Unreadable("it is no request for a worker")
