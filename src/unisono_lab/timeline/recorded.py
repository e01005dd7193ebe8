"""The spans of all workers of a run, read from its run folders."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from unisono.errors import JobError, Unreadable
from unisono.jsonl import raw_lines
from unisono.received import parse_json, value_of
from unisono.spans import FOLDER, KINDS, Kind

# Clocks of several hosts, put on one: by what the coordinator's showed, or by exchanges in which all wait for all.


WINDOW = 50
"""Exchanges from which one look is made, where no coordinator tells its time."""


@dataclass(frozen=True, slots=True)
class Look:
    """A moment at which two clocks were compared.

    Attributes:
        at: the moment on the clock that is to be put right, in nanoseconds.
        ahead: the nanoseconds by which the other clock was ahead.
        within: the nanoseconds by which that may be wrong, up or down.
    """

    at: int
    ahead: int
    within: int


@dataclass(frozen=True, slots=True)
class Correction:
    """The way from one clock to the common one: between two looks, in proportion.

    Attributes:
        looks: the looks, in the order of time; none where the clock is the common one.
    """

    looks: tuple[Look, ...] = ()

    @classmethod
    def of(cls, looks: Iterable[Look]) -> Correction:
        """From looks in any order; of several at one moment, the best."""
        best: dict[int, Look] = {}
        for look in looks:
            if look.at not in best or look.within < best[look.at].within:
                best[look.at] = look
        return cls(tuple(best[at] for at in sorted(best)))

    def __call__(self, at: int) -> int:
        """A moment on the common clock, in nanoseconds."""
        if not self.looks:
            return at
        after = bisect(self.looks, at, key=lambda look: look.at)
        if after in (0, len(self.looks)):
            return at + self.looks[min(after, len(self.looks) - 1)].ahead
        before, behind = self.looks[after - 1], self.looks[after]
        share = (at - before.at) / (behind.at - before.at)
        return at + before.ahead + round(share * (behind.ahead - before.ahead))

    @property
    def within(self) -> int:
        """The nanoseconds by which the median look may be wrong; 0 for the common clock."""
        return sorted(look.within for look in self.looks)[len(self.looks) // 2] if self.looks else 0


Exchange = tuple[int, int]
"""From when to when a worker was in an exchange that nobody leaves before all have come, in nanoseconds."""


def looks_by_exchanges(
    own: Mapping[tuple[int, int], Exchange], others: Mapping[tuple[int, int], Exchange]
) -> list[Look]:
    """What exchanges tell of another clock: whoever has left one has left it after the other has come.

    Args:
        own: the exchanges of a worker whose clock is to be put right, by what tells them from others.
        others: those of a worker with the common clock.
    """
    shared = sorted(own.keys() & others.keys())
    found = []
    for first in range(0, len(shared), WINDOW):
        pairs = [(own[key], others[key]) for key in shared[first : first + WINDOW]]
        most = min(their_end - our_begin for (our_begin, _), (_, their_end) in pairs)
        least = max(their_begin - our_end for (_, our_end), (their_begin, _) in pairs)
        middle = pairs[len(pairs) // 2][0][0]
        found.append(Look(middle, (most + least) // 2, abs(most - least) // 2))
    return found


def corrections(
    looks: Mapping[str, Sequence[Look]], exchanges: Mapping[str, Mapping[tuple[int, int], Exchange]]
) -> dict[str, Correction | None]:
    """What puts each clock on the common one, which is the coordinator's, or without one that of the first host.

    Args:
        looks: the looks of each clock at the coordinator's.
        exchanges: the exchanges of one worker with each clock.

    Returns:
        by clock; None for one of which nothing is known.
    """
    if len(looks) == 1:
        return dict.fromkeys(looks, Correction())
    if all(looks.values()):
        return {clock: Correction.of(found) for clock, found in looks.items()}
    common, *others = looks
    found: dict[str, Correction | None] = {common: Correction()}
    for clock in others:
        told = looks_by_exchanges(exchanges.get(clock, {}), exchanges.get(common, {}))
        found[clock] = Correction.of(told) if told else None
    return found


# The spans of all workers of a run, read from its run folders.


MOST_FILES = 4096
MOST_WORKERS = 65536
LONGEST = 10**18
"""Nanoseconds from one moment to another: thirty years."""


class PlacedSpan(NamedTuple):
    """A span on the common clock, in nanoseconds; fields as of :class:`unisono.spans.WorkSpan`."""

    kind: Kind
    begun: int
    ended: int
    on_main: bool
    number: int
    ready: int

    @property
    def took(self) -> int:
        """Nanoseconds."""
        return self.ended - self.begun


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """What a worker did in a step, or between two.

    Attributes:
        step: the number of the step; -1 before the first.
        is_done: whether the step was committed with these spans; else they are of an attempt, or of a boundary.
        generation: the number of the generation.
        rank: the rank in it.
        workers: the number of its workers.
        spans: the spans.
    """

    step: int
    is_done: bool
    generation: int
    rank: int
    workers: int
    spans: tuple[PlacedSpan, ...]

    def all(self, kind: Kind) -> list[PlacedSpan]:
        """The spans of a kind."""
        return [span for span in self.spans if span.kind == kind]

    def seconds(self, kind: Kind) -> float:
        """The seconds of all spans of a kind together."""
        return sum(span.took for span in self.all(kind)) / 1e9

    @property
    def shards(self) -> int:
        """The number of shards; a device that holds several stages has several passes for each."""
        return len({span.number for span in self.all("forward")})

    @property
    def begun(self) -> int:
        """The earliest moment."""
        return min(span.begun for span in self.spans)

    @property
    def ended(self) -> int:
        """The latest moment."""
        return max(span.ended for span in self.spans)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What one worker has written down since it started.

    Attributes:
        worker: its id; ``rank-N`` where workers stay the same.
        host: the name of its host.
        pid: the id of its process.
        clock: what tells its clock from those of other hosts.
        began: the nanoseconds of its clock at its start, and the seconds since 1970.
        steps: what it did, in order.
        looks: its looks at the coordinator's clock.
        profile: the file of torch's profiler, if there is one.
    """

    worker: str
    host: str
    pid: int
    clock: str
    began: tuple[int, float]
    steps: list[WorkerStep] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    profile: Path | None = None

    @property
    def name(self) -> str:
        """For people: ``w3 on host b``; ranks for workers that stay the same."""
        return f"{self.worker.replace('rank-', 'rank ')} on host {self.host}"

    def at(self, correction: Correction) -> WorkerRecord:
        """The same on the common clock."""
        return replace(self, steps=[_at(step, correction) for step in self.steps])


@dataclass(frozen=True)
class StepTimelines:
    """What all workers of a run did when, on one clock.

    Attributes:
        workers: the records of the workers, in the order in which they started.
        corrections: what has put each clock on the common one; None for a clock of which nothing is known.
        left_out: the lines that could not be read, for people.
    """

    workers: Sequence[WorkerRecord]
    corrections: Mapping[str, Correction | None]
    left_out: Sequence[str] = ()

    @cached_property
    def by_step(self) -> dict[int, dict[int, WorkerStep]]:
        """What each worker did in committed steps, by its place in :attr:`workers`; in repeated ones, the last time."""
        found: dict[int, dict[int, WorkerStep]] = defaultdict(dict)
        for place, worker in enumerate(self.workers):
            for each in worker.steps:
                if each.is_done:
                    found[each.step][place] = each
        newest = {step: max(each.generation for each in them.values()) for step, them in found.items()}
        return {
            step: {place: each for place, each in found[step].items() if each.generation == newest[step]}
            for step in sorted(found)
        }


def read(folders: Sequence[Path]) -> StepTimelines:
    """The spans in run folders: one for each host that has a copy of its own.

    Raises:
        JobError: there are none, or they cannot be read; says what to do.
    """
    files = [file for folder in folders for file in sorted((folder / FOLDER).glob("*.jsonl"))]
    if not files:
        listed = ", ".join(map(str, folders))
        raise JobError(f"no timeline is recorded in {listed}: train with unisono run --timeline")
    if len(files) > MOST_FILES:
        raise JobError(f"{len(files)} files of workers are more than the {MOST_FILES} that can be shown")
    workers, left_out = list[WorkerRecord](), list[str]()
    for file in files:
        try:
            found, wrong = _records(file)
        except (OSError, Unreadable) as error:
            raise JobError(f"{file} cannot be read: {error}") from error
        workers += found
        left_out += [f"{file}: {wrong} lines cannot be read and are left out"] if wrong else []
    return on_one_clock([worker for worker in workers if worker.steps], left_out)


def on_one_clock(workers: Sequence[WorkerRecord], left_out: Sequence[str] = ()) -> StepTimelines:
    """The records of workers, whose clocks may differ, put on one clock.

    Raises:
        JobError: none of them has a step.
    """
    if not workers:
        raise JobError("no worker has come as far as a step: there is nothing to show")
    looks: dict[str, list[Look]] = defaultdict(list)
    exchanges: dict[str, dict[tuple[int, int], tuple[int, int]]] = {}
    for worker in workers:
        looks[worker.clock] += worker.looks
        own = {(each.step, each.generation): _exchange(each) for each in worker.steps if each.all("exchange")}
        exchanges[worker.clock] = exchanges.get(worker.clock) or own
    found = corrections(looks, exchanges)
    moved = [worker.at(found[worker.clock] or Correction()) for worker in workers]
    return StepTimelines(sorted(moved, key=lambda worker: worker.steps[0].begun), found, left_out)


def _exchange(step: WorkerStep) -> tuple[int, int]:
    last = step.all("exchange")[-1]
    return last.begun, last.ended


HEADER = {"worker": str, "host": str, "pid": int, "clock": str, "now": int, "time": float}
LOOK = {"clock_at": int, "coordinator": int, "within": int}
STEP = {
    "step": int,
    "done": bool,
    "generation": int,
    "rank": int,
    "workers": int,
    "at": int,
    "spans": list[list[str | int]],
}
LONGEST_NAME = 256


def _records(file: Path) -> tuple[list[WorkerRecord], int]:
    """The starts of a worker that a file tells of, and the number of lines that cannot be read."""
    records, wrong = list[WorkerRecord](), 0
    profile = file.with_suffix(".torch.json")
    for line in raw_lines(file):
        if not line.endswith(b"\n"):  # somebody is just writing it, or was killed
            continue
        try:
            found = parse_json(line)
            if isinstance(found, dict) and "worker" in found:
                records.append(_header(found))
            elif not records:
                wrong += 1
            elif isinstance(found, dict) and "clock_at" in found:
                records[-1].looks.append(_look(found))
            else:
                records[-1].steps.append(_step(found))
        except Unreadable:
            wrong += 1
    if records and profile.is_file():
        records[-1] = replace(records[-1], profile=profile)
    return records, wrong


def _header(found: Mapping[str, Any]) -> WorkerRecord:
    about = value_of(HEADER, found, "a start")
    for name in ("worker", "host", "clock"):
        _require(0 < len(about[name]) <= LONGEST_NAME and about[name].isprintable())
    _require(0 <= about["now"] <= LONGEST and 0 <= about["time"] <= LONGEST)
    return WorkerRecord(
        about["worker"], about["host"], about["pid"], about["clock"], (about["now"], float(about["time"]))
    )


def _look(found: Mapping[str, Any]) -> Look:
    about = value_of(LOOK, found, "a look")
    _require(all(0 <= value <= LONGEST for value in about.values()))
    return Look(about["clock_at"], about["coordinator"] - about["clock_at"], about["within"])


def _step(found: Any) -> WorkerStep:
    about = value_of(STEP, found, "a step")
    spans = tuple(_spans(about["at"], about["spans"]))
    _require(0 <= about["at"] <= LONGEST and len(spans) > 0 and 0 <= about["rank"] < about["workers"] <= MOST_WORKERS)
    _require(about["step"] >= -1 and about["generation"] >= 0)
    return WorkerStep(about["step"], about["done"], about["generation"], about["rank"], about["workers"], spans)


def _spans(at: int, rows: Sequence[Sequence[Any]]) -> Iterator[PlacedSpan]:
    for row in rows:
        _require(len(row) in (5, 6) and row[0] in KINDS and all(type(each) is int for each in row[1:]))
        kind, begun, ended, on_main, number, *ready = row
        _require(-LONGEST <= begun <= ended <= LONGEST and on_main in (0, 1) and number >= -1)
        yield PlacedSpan(kind, at + begun, at + ended, bool(on_main), number, at + ready[0] if ready else 0)


def _require(is_right: bool) -> None:
    if not is_right:
        raise Unreadable("it is out of range")


def _at(step: WorkerStep, correction: Correction) -> WorkerStep:
    moved = (
        span._replace(
            begun=correction(span.begun),
            ended=max(correction(span.begun), correction(span.ended)),
            ready=correction(span.ready) if span.ready else 0,
        )
        for span in step.spans
    )
    return replace(step, spans=tuple(moved))
