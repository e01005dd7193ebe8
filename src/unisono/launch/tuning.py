"""The variables that decide whether a worker's memory allocator keeps freed memory. They change no bit of a result."""

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
    """Variables of the GNU C library that belong together: if a person has set one of them, we set none.

    Attributes:
        others: further variables by which a person may have decided the same.
    """

    variables: Mapping[str, str]
    others: tuple[str, ...] = ()

    def set_in(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Those of the variables that a person has set."""
        names = (*self.variables, *self.others)
        tunables = environ.get(TUNABLES, "")
        values = {name: environ[name] for name in names if name in environ}
        return values | ({TUNABLES: tunables} if any(f"{_tunable(name)}=" in tunables for name in names) else {})


def _tunable(name: str) -> str:
    """The name of a variable within GLIBC_TUNABLES."""
    return f"glibc.malloc.{name.removeprefix('MALLOC_').rstrip('_').lower()}"


KEEPING = _Decision(
    {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": NEVER}, others=("MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
)
"""Freed memory of any size stays with the process.

Only both together do that: each one alone fixes the other at 128 KiB, which would otherwise adapt to the program. A
high MALLOC_MMAP_THRESHOLD_ instead of no mapping at all does the same, but glibc before 2.35 ignores one above 32 MiB.
"""

GIVING_BACK = _Decision(
    {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**25)},
    others=("MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"),
)
"""Blocks of 1 MiB and more go back to the system: models that need several devices need memory more than time."""

OTHERS = (
    # One heap for all threads: a thread's own heap has pieces of 64 MiB, which go back to the system when empty.
    _Decision({"MALLOC_ARENA_MAX": "1"}, others=("MALLOC_ARENA_TEST",)),
    # Huge pages, where the system leaves them to the program: fewer page faults and TLB misses.
    _Decision({TUNABLES: "glibc.malloc.hugetlb=1"}),
)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The settings of the workers' memory allocator.

    Attributes:
        variables: the variables to set.
        kept: the variables that the person has set, which stay as they are.
        missing: why no variable is set; None if one is.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None

    @classmethod
    def of_this_process(cls, *, wanted: bool = True, devices: int = 1) -> "Tuning":
        """The tuning for this process's environment and C library, and this number of devices of each worker."""
        return tune(os.environ, platform.libc_ver()[0], wanted=wanted, devices=devices)

    @property
    def is_wanted(self) -> bool:
        """Whether tuning is not switched off."""
        return self.missing != SWITCHED_OFF

    @property
    def lines(self) -> list[str]:
        """The lines that tell a person about it."""
        tuned = [f"tuning (--no-tuning leaves it out): {assignments(self.variables)}"] if self.variables else []
        missing = [f"no tuning: {self.missing}"] if self.missing else []
        kept = [f"kept as you set it: {assignments(self.kept)}"] if self.kept else []
        return tuned + missing + kept


def assignments(variables: Mapping[str, str]) -> str:
    """Assignments of variables in a shell's syntax; empty if there are none."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def tune(environ: Mapping[str, str], c_library: str, *, wanted: bool = True, devices: int = 1) -> Tuning:
    """Decide how the workers' memory allocator is set.

    ``c_library`` is the name from ``platform.libc_ver``. With several devices memory goes back to the system.
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
        already_set = decision.set_in(environ)
        kept |= already_set
        variables |= {} if already_set else decision.variables
    return Tuning(variables, kept, None if variables else "all of it is set already")


def _foreign_allocator(preloaded: str) -> str | None:
    """The first library of LD_PRELOAD whose name is that of an allocator; None if there is none."""
    libraries = preloaded.replace(":", " ").split()
    return next((library for library in libraries if "malloc" in Path(library).name.lower()), None)
