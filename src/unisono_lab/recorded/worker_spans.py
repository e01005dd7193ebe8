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

# The clocks of several hosts, put on one: by the coordinator's clock, or by exchanges of all workers.


WINDOW = 50
"""The number of exchanges from which a look is made if there is no coordinator's clock."""


@dataclass(frozen=True, slots=True)
class Look:
    """A moment at which two clocks were compared.

    Attributes:
        at: the moment on the clock that is to be corrected, in nanoseconds.
        ahead: the nanoseconds by which the other clock was ahead.
        within: the largest error of ``ahead``, up or down, in nanoseconds.
    """

    at: int
    ahead: int
    within: int


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction of one clock to the common one, which is interpolated between two looks.

    Attributes:
        looks: the looks, in the order of time; empty if the clock is the common one.
    """

    looks: tuple[Look, ...] = ()

    @classmethod
    def of(cls, looks: Iterable[Look]) -> Correction:
        """Make a correction from looks in any order; of several at one moment the best is taken."""
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
        last_look, next_look = self.looks[after - 1], self.looks[after]
        share = (at - last_look.at) / (next_look.at - last_look.at)
        return at + last_look.ahead + round(share * (next_look.ahead - last_look.ahead))

    @property
    def within(self) -> int:
        """The median of the looks' errors in nanoseconds; 0 for the common clock."""
        return sorted(look.within for look in self.looks)[len(self.looks) // 2] if self.looks else 0


Exchange = tuple[int, int]
"""The begin and the end of a worker's exchange, which no worker leaves before all have begun it, in nanoseconds."""


def looks_by_exchanges(
    own: Mapping[tuple[int, int], Exchange], others: Mapping[tuple[int, int], Exchange]
) -> list[Look]:
    """Compare two clocks by exchanges: each worker leaves an exchange after the other has begun it.

    Args:
        own: the exchanges of a worker whose clock is to be corrected, by step and generation.
        others: the exchanges of a worker with the common clock.
    """
    shared = sorted(own.keys() & others.keys())
    new_looks = []
    for first in range(0, len(shared), WINDOW):
        pairs = [(own[key], others[key]) for key in shared[first : first + WINDOW]]
        largest = min(their_end - our_begin for (our_begin, _), (_, their_end) in pairs)
        smallest = max(their_begin - our_end for (_, our_end), (their_begin, _) in pairs)
        middle = pairs[len(pairs) // 2][0][0]
        new_looks.append(Look(middle, (largest + smallest) // 2, abs(largest - smallest) // 2))
    return new_looks


def corrections(
    looks: Mapping[str, Sequence[Look]], exchanges: Mapping[str, Mapping[tuple[int, int], Exchange]]
) -> dict[str, Correction | None]:
    """The correction of each clock to the common one: the coordinator's, or without one that of the first host.

    None stands for a clock that could not be compared.
    """
    if len(looks) == 1:
        return dict.fromkeys(looks, Correction())
    if all(looks.values()):
        return {clock: Correction.of(own_looks) for clock, own_looks in looks.items()}
    common, *others = looks
    by_clock: dict[str, Correction | None] = {common: Correction()}
    for clock in others:
        new_looks = looks_by_exchanges(exchanges.get(clock, {}), exchanges.get(common, {}))
        by_clock[clock] = Correction.of(new_looks) if new_looks else None
    return by_clock


# The spans of all workers of a run, read from its run folders.


MOST_FILES = 4096
MOST_WORKERS = 65536
LONGEST = 10**18
"""The longest time between two moments, in nanoseconds: thirty years."""


class PlacedSpan(NamedTuple):
    """A span on the common clock, in nanoseconds; the fields are those of :class:`unisono.spans.WorkSpan`."""

    kind: Kind
    begun: int
    ended: int
    on_main: bool
    number: int
    ready: int

    @property
    def took(self) -> int:
        """The length in nanoseconds."""
        return self.ended - self.begun


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """The spans of a worker in a step, or between two steps.

    Attributes:
        step: the number of the step; -1 before the first.
        is_done: whether the step was committed with these spans; otherwise they are those of a failed attempt, or
            between two steps.
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
        """The begin of the earliest span."""
        return min(span.begun for span in self.spans)

    @property
    def ended(self) -> int:
        """The end of the latest span."""
        return max(span.ended for span in self.spans)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The record of one start of a worker.

    Attributes:
        worker: the worker's id; ``rank-N`` in a job that is not elastic.
        clock: the identifier of its clock, which is that of its host.
        began: the time of its start: its clock in nanoseconds, and the seconds since 1970.
        looks: its looks at the coordinator's clock.
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
        """The worker's name as text: ``w3 on host b``, or ``rank 3 on host b`` in a job that is not elastic."""
        return f"{self.worker.replace('rank-', 'rank ')} on host {self.host}"

    def at(self, correction: Correction) -> WorkerRecord:
        """The same record on the common clock."""
        return replace(self, steps=[_at(step, correction) for step in self.steps])


@dataclass(frozen=True)
class StepTimelines:
    """The spans of all workers of a run, on one clock.

    Attributes:
        corrections: the correction of each clock; None for a clock that could not be compared.
        left_out: sentences about lines that could not be read.
    """

    workers: Sequence[WorkerRecord]
    corrections: Mapping[str, Correction | None]
    left_out: Sequence[str] = ()

    @cached_property
    def by_step(self) -> dict[int, dict[int, WorkerStep]]:
        """The spans of committed steps, by step and by place in :attr:`workers`; of repeated steps, the last ones."""
        steps: dict[int, dict[int, WorkerStep]] = defaultdict(dict)
        for place, worker in enumerate(self.workers):
            for worker_step in worker.steps:
                if worker_step.is_done:
                    steps[worker_step.step][place] = worker_step
        newest = {
            step: max(worker_step.generation for worker_step in by_place.values()) for step, by_place in steps.items()
        }
        return {
            step: {
                place: worker_step
                for place, worker_step in steps[step].items()
                if worker_step.generation == newest[step]
            }
            for step in sorted(steps)
        }


def read(folders: Sequence[Path]) -> StepTimelines:
    """Read the spans in run folders: one folder, or one for each host that has its own.

    Raises:
        JobError: there are no spans, or they cannot be read; the message says what to do.
    """
    files = [file for folder in folders for file in sorted((folder / FOLDER).glob("*.jsonl"))]
    if not files:
        listing = ", ".join(map(str, folders))
        raise JobError(f"no timeline is recorded in {listing}: train with unisono run --timeline")
    if len(files) > MOST_FILES:
        raise JobError(f"{len(files)} files of workers are more than the {MOST_FILES} that can be shown")
    workers, left_out = list[WorkerRecord](), list[str]()
    for file in files:
        try:
            records, damaged = _records(file)
        except (OSError, Unreadable) as error:
            raise JobError(f"{file} cannot be read: {error}") from error
        workers += records
        left_out += [f"{file}: {damaged} lines cannot be read and are left out"] if damaged else []
    return on_one_clock([worker for worker in workers if worker.steps], left_out)


def on_one_clock(workers: Sequence[WorkerRecord], left_out: Sequence[str] = ()) -> StepTimelines:
    """Put the records of workers, whose clocks may differ, on one clock.

    Raises:
        JobError: there are no workers with steps.
    """
    if not workers:
        raise JobError("no worker has recorded a step: there is nothing to show")
    looks: dict[str, list[Look]] = defaultdict(list)
    exchanges: dict[str, dict[tuple[int, int], tuple[int, int]]] = {}
    for worker in workers:
        looks[worker.clock] += worker.looks
        own = {(step.step, step.generation): _exchange(step) for step in worker.steps if step.all("exchange")}
        exchanges[worker.clock] = exchanges.get(worker.clock) or own
    by_clock = corrections(looks, exchanges)
    moved = [worker.at(by_clock[worker.clock] or Correction()) for worker in workers]
    return StepTimelines(sorted(moved, key=lambda worker: worker.steps[0].begun), by_clock, left_out)


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
    """The records of all starts of a worker in a file, and the number of lines that cannot be read."""
    records, damaged = list[WorkerRecord](), 0
    profile = file.with_suffix(".torch.json")
    for line in raw_lines(file):
        if not line.endswith(b"\n"):  # the line is being written, or its writer was killed
            continue
        try:
            value = parse_json(line)
            if isinstance(value, dict) and "worker" in value:
                records.append(_header(value))
            elif not records:
                damaged += 1
            elif isinstance(value, dict) and "clock_at" in value:
                records[-1].looks.append(_look(value))
            else:
                records[-1].steps.append(_step(value))
        except Unreadable:
            damaged += 1
    if records and profile.is_file():
        records[-1] = replace(records[-1], profile=profile)
    return records, damaged


def _header(values: Mapping[str, Any]) -> WorkerRecord:
    fields = value_of(HEADER, values, "a start")
    for name in ("worker", "host", "clock"):
        _require(0 < len(fields[name]) <= LONGEST_NAME and fields[name].isprintable())
    _require(0 <= fields["now"] <= LONGEST and 0 <= fields["time"] <= LONGEST)
    return WorkerRecord(
        fields["worker"], fields["host"], fields["pid"], fields["clock"], (fields["now"], float(fields["time"]))
    )


def _look(values: Mapping[str, Any]) -> Look:
    fields = value_of(LOOK, values, "a look")
    _require(all(0 <= value <= LONGEST for value in fields.values()))
    return Look(fields["clock_at"], fields["coordinator"] - fields["clock_at"], fields["within"])


def _step(values: Any) -> WorkerStep:
    fields = value_of(STEP, values, "a step")
    spans = tuple(_spans(fields["at"], fields["spans"]))
    _require(
        0 <= fields["at"] <= LONGEST and len(spans) > 0 and 0 <= fields["rank"] < fields["workers"] <= MOST_WORKERS
    )
    _require(fields["step"] >= -1 and fields["generation"] >= 0)
    return WorkerStep(fields["step"], fields["done"], fields["generation"], fields["rank"], fields["workers"], spans)


def _spans(at: int, rows: Sequence[Sequence[Any]]) -> Iterator[PlacedSpan]:
    for row in rows:
        _require(len(row) in (5, 6) and row[0] in KINDS and all(type(value) is int for value in row[1:]))
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
