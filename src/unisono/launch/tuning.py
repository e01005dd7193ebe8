"""The variables that have a worker's memory allocator keep what a step gives back, or not. They decide no bit."""

import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

NEVER = str(2**40)
SWITCHED_OFF = "switched off"
TUNABLES = "GLIBC_TUNABLES"


@dataclass(frozen=True, slots=True)
class _Decision:
    """Variables of the GNU C library that belong together: who has set one of them has decided on all.

    Attributes:
        others: variables by which a person may have decided the same.
    """

    variables: Mapping[str, str]
    others: tuple[str, ...] = ()

    def taken(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What a person has set of it."""
        names = (*self.variables, *self.others)
        tunables = environ.get(TUNABLES, "")
        set_here = {name: environ[name] for name in names if name in environ}
        return set_here | ({TUNABLES: tunables} if any(f"{_tunable(name)}=" in tunables for name in names) else {})


def _tunable(name: str) -> str:
    """What a variable is called within GLIBC_TUNABLES."""
    return f"glibc.malloc.{name.removeprefix('MALLOC_').rstrip('_').lower()}"


KEEPING = _Decision(
    {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": NEVER}, others=("MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
)
"""Freed memory of any size stays with the process.

Only both together do that: each one alone fixes the other at 128 KiB, where it would else follow what the program does.
A high MALLOC_MMAP_THRESHOLD_ instead of no mapping at all does the same, but glibc before 2.35 refuses one above 32 MiB
without a word.
"""

GIVING_BACK = _Decision(
    {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**25)},
    others=("MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"),
)
"""Pieces from 1 MiB on go back to the system: models that need several devices need their memory more than time."""

OTHERS = (
    # A thread's own heap is of 64 MiB pieces, which go back to the system as soon as they are empty. One for all.
    _Decision({"MALLOC_ARENA_MAX": "1"}, others=("MALLOC_ARENA_TEST",)),
    # Huge pages, where the system leaves them to the program: fewer faults, and less work to find a page.
    _Decision({TUNABLES: "glibc.malloc.hugetlb=1"}),
)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The settings of the workers' memory allocator.

    Attributes:
        kept: what the person has set, which goes first.
        missing: why nothing is set, if so.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None

    @classmethod
    def of_this_process(cls, *, wanted: bool = True, devices: int = 1) -> "Tuning":
        """What this process's environment and C library, and so many devices per worker call for."""
        return tune(os.environ, platform.libc_ver()[0], wanted=wanted, devices=devices)

    @property
    def is_wanted(self) -> bool:
        """Whether the person has not switched it off."""
        return self.missing != SWITCHED_OFF

    @property
    def lines(self) -> list[str]:
        """What a person should know about it."""
        set_here = [f"tuning (--no-tuning leaves it out): {assignments(self.variables)}"] if self.variables else []
        missing = [f"no tuning: {self.missing}"] if self.missing else []
        kept = [f"kept as you set it: {assignments(self.kept)}"] if self.kept else []
        return set_here + missing + kept


def assignments(variables: Mapping[str, str]) -> str:
    """Variables as a shell takes them; empty if there are none."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def tune(environ: Mapping[str, str], c_library: str, *, wanted: bool = True, devices: int = 1) -> Tuning:
    """Decide how the workers' memory allocator is set.

    The C library has the name that ``platform.libc_ver`` gives it. With several devices memory goes back to the system.
    """
    if not wanted:
        return Tuning(missing=SWITCHED_OFF)
    if c_library != "glibc":
        return Tuning(missing="it is for the allocator of the GNU C library, and this is another")
    if (foreign := _foreign_allocator(environ.get("LD_PRELOAD", ""))) is not None:
        return Tuning(missing=f"LD_PRELOAD brings an allocator of its own, {foreign}")
    variables: dict[str, str] = {}
    kept: dict[str, str] = {}
    for decision in (KEEPING if devices == 1 else GIVING_BACK, *OTHERS):
        taken = decision.taken(environ)
        kept |= taken
        variables |= {} if taken else decision.variables
    return Tuning(variables, kept, None if variables else "all of it is set already")


def _foreign_allocator(preloaded: str) -> str | None:
    """The first library of LD_PRELOAD that is an allocator, by its name."""
    libraries = preloaded.replace(":", " ").split()
    return next((library for library in libraries if "malloc" in Path(library).name.lower()), None)
