"""The messages about data that cannot be read: one table, with what to do instead."""

import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any


class Refusals:
    """A table of messages for errors. Called with the name of one and the words in its braces, it gives that one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, name: str, /, **words: Any) -> str:
        """The message of a refusal."""
        what, _, why = name.partition(".")
        return self.rows[what][why].format(**words)

    @cached_property
    def rows(self) -> dict[str, dict[str, str]]:
        """The messages."""
        rows: dict[str, dict[str, str]] = tomllib.loads(self._path.read_text("utf-8"))
        return rows


refused = Refusals(Path(__file__).with_name("refusals.toml"))
