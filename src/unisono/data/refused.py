"""What people are told of data that cannot be taken: one table, with what to do instead."""

import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any


class Refusals:
    """A table of refusals. Called with the name of one and the words in its braces, it gives the message for an error.

    Args:
        path: the file of the table.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, name: str, /, **words: Any) -> str:
        """The message of a refusal.

        Args:
            name: what is refused, and why, as in the table.
            words: what stands there in braces, by name.
        """
        what, _, why = name.partition(".")
        return self.rows[what][why].format(**words)

    @cached_property
    def rows(self) -> dict[str, dict[str, str]]:
        """The messages."""
        found: dict[str, dict[str, str]] = tomllib.loads(self._path.read_text("utf-8"))
        return found


refused = Refusals(Path(__file__).with_name("refusals.toml"))
