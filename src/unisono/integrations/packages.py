"""Packages of other frameworks: whether they are installed, and new enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from unisono.errors import JobError

OLDEST: Mapping[str, str] = {
    "accelerate": "1.10",
    "keras": "3.15",
    "lightning": "2.6",
    "pytorch-lightning": "2.6",
    "transformers": "5.6",
}
"""The oldest versions that are supported; ``make oldest-frameworks`` tests them."""


def installed(name: str) -> str | None:
    """A package's version; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def require(guest: str, packages: Sequence[str], version_of: Callable[[str], str | None] = installed) -> None:
    """Tell what is missing, before anything loads it.

    Args:
        guest: the name of the adapter below ``unisono``, and of the extra with all that it needs.
        packages: the names of the packages that it needs.
        version_of: a function of a package's name: the version that is installed, or None.

    Raises:
        JobError: a package is not installed, or too old; says how to install it.
    """
    lacks = []
    for name in packages:
        found = version_of(name)
        if found is None:
            lacks.append((name, "which is not installed"))
        elif _numbers(found) < _numbers(OLDEST[name]):
            lacks.append((name, f"and {found} is installed"))
    if lacks:
        needs = ", and ".join(f"{name} {OLDEST[name]} or newer, {why}" for name, why in lacks)
        words = " ".join(f"'{name}>={OLDEST[name]}'" for name, _ in lacks)
        raise JobError(
            f"unisono.{guest} needs {needs}: pip install {words} (in a clone of Unisono: pip install -c "
            f"constraints.txt '.[{guest}]')"
        )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]
