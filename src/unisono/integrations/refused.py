"""What guests are told of what cannot be kept: one table, with what to do instead."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


def refused(name: str, /, **words: Any) -> str:
    """The message of a refusal, for an error.

    Args:
        name: the guest and the refusal, as in ``refusals.toml``.
        words: what stands there in braces, by name.
    """
    guest, _, refusal = name.partition(".")
    return refusals()[guest][refusal].format(**words)


@cache
def refusals() -> dict[str, dict[str, str]]:
    """The table: messages by guest and name."""
    found: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text("utf-8"))
    return found
