"""Attributes of other people's objects: another one for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def put(thing: Any, name: str, value: Any) -> Iterator[None]:
    """An object has another attribute or method in here, by itself: others of its class have their own."""
    has_own, before = name in vars(thing), vars(thing).get(name)
    vars(thing)[name] = value
    try:
        yield
    finally:
        if has_own:
            vars(thing)[name] = before
        else:
            del vars(thing)[name]
