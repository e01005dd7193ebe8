"""The variables of the environment that are ours, and what is probably meant by one that is not."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from unisono.settings.reading import TABLE
from unisono.settings.table import OF_LAUNCHERS

OURS = "UNISONO_"
KNOWN = frozenset({setting.row.variable for setting in TABLE.values() if setting.row.variable} | OF_LAUNCHERS.keys())


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """A sentence for each variable that begins as ours do, and is none of ours.

    Args:
        names: the names of all variables of the environment.
    """
    for name in sorted(name for name in names if name.startswith(OURS) and name not in KNOWN):
        near = get_close_matches(name.removeprefix(OURS), [known.removeprefix(OURS) for known in KNOWN], 1, cutoff=0.7)
        meant = f": did you mean {OURS}{near[0]}?" if near else "; docs/guide/settings.md lists those that there are"
        yield f"{name} is set in the environment, and Unisono has no such variable{meant}"
