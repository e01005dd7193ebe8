"""The table that ``make hosts`` prints: what happened to jobs on each engine, and whether they got through it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ENGINES = ("unisono join", "ssh", "Slurm", "Ray", "Kubernetes")
"""Its rows. A test is of a cell if it is marked: ``@pytest.mark.hosts("Slurm", "kill")``."""

EVENTS = {
    "kill": "a host dies",
    "join": "hosts come to a job and go",
    "requeue": "the whole job is stopped and started again",
    "drain": "a host has to be left in time",
}
"""Its columns."""

WORST_FIRST = ("FAILED", "skipped", "passed")


@dataclass(frozen=True)
class Tried:
    """One test's end.

    Attributes:
        engine: the row.
        events: the columns.
        outcome: one of ``WORST_FIRST``.
        seconds: how long it took.
    """

    engine: str
    events: Sequence[str]
    outcome: str
    seconds: float

    @classmethod
    def of(cls, mark: Any, kind: str, seconds: float) -> "Tried":
        """What pytest says of a test: the arguments of its mark, and how it counts it."""
        engine, *events = mark
        return cls(engine, events, "FAILED" if kind in ("error", "failed") else kind, seconds)


def table(tried: Iterable[Tried]) -> list[str]:
    """Its lines: in each cell the worst outcome, and the seconds of all tests together."""
    found: dict[tuple[str, str], list[Tried]] = {}
    for one in tried:
        for event in one.events:
            found.setdefault((one.engine, event), []).append(one)
    rows = [("", *EVENTS)]
    rows += [(engine, *(_cell(found.get((engine, each))) for each in EVENTS)) for engine in ENGINES]
    lines = ["".join(f"{word:<20}" for word in row) for row in rows]
    return [line.rstrip() for line in lines] + [f"{event}: {words}" for event, words in EVENTS.items()]


def _cell(tried: Sequence[Tried] | None) -> str:
    if not tried:
        return "not tried"
    worst = min((one.outcome for one in tried), key=WORST_FIRST.index)
    return worst if worst == "skipped" else f"{worst} ({sum(one.seconds for one in tried):.0f} s)"
