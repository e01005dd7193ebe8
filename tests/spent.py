"""The processor seconds that tests take with all processes that they start: what the suite waits for.

The time of a clock says little about a test: it depends on what runs beside it. Processor seconds do so less.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath

from leaks import read

SPENT = "processor_s"
"""The property of a test's report that holds its own."""

SHOWN = 10


def processor_s() -> float:
    """What this process has taken so far, and all below it: those that run, and those that somebody has waited for.

    Whoever has lost its parent is left out.
    """
    own = os.times()
    ticks = sum(sum(map(int, _fields(pid)[11:15])) for pid in _below("self"))
    return own.user + own.system + own.children_user + own.children_system + ticks / os.sysconf("SC_CLK_TCK")


def _fields(pid: str) -> list[bytes]:
    """What the system says of a process, behind its name; nothing once it is gone."""
    with suppress(OSError):
        return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return []


def _below(pid: str) -> Iterator[str]:
    """The processes that a process has started, and that these have started; none where the system does not say."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 (names, not paths)
            with suppress(OSError):  # it has ended
                for child in read(f"/proc/{pid}/task/{thread}/children").decode().split():
                    yield child
                    yield from _below(child)


def dearest(spent: Mapping[str, float]) -> list[str]:
    """The lines that say which files and which tests took most.

    Args:
        spent: the processor seconds of each test, by its id.
    """
    files = Counter[str]()
    for test, seconds in spent.items():
        files[PurePath(test.partition("::")[0]).name] += seconds  # type: ignore[assignment]  # counts may be fractions
    lines = [f"{sum(spent.values()):.0f} processor-seconds, of which"]
    for each in (files, Counter(spent)):
        lines += [f"{seconds:7.1f} {name.removeprefix('tests/')}" for name, seconds in each.most_common(SHOWN)]
    return lines
