"""A run as the page shows it: live, late or over, made of the same lines."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unisono.plan.split import Split
from unisono.received import short
from unisono_lab.events import moment_of, title_of
from unisono_lab.page.curves import (
    LARGEST_STEP,
    PARTS,
    Curves,
    CurveTable,
    Entry,
    Mark,
    Stretches,
    Thinned,
    number,
    shard_seconds,
)
from unisono_lab.page.source import NewLines

# What happened in a run, made of the lines of ``journal.jsonl``: generations, workers, and marks on its time.


MOST_MARKS = 160
"""Groups of each kind."""

MOST_TOLD = 60
"""Of the newest events, as a list."""

MOST_FIGURES, LONGEST_TEXT = 12, 200
MOST_WORKERS = 65536
MOST_HOSTS = 4096
"""Workers whose hosts are remembered: beyond that, those of the present generation alone."""


EVENTS: Mapping[str, Sequence[str]] = {
    "lost": ("lost", "agent lost"),
    "join": (),
    "left": ("left", "excluded", "replaced"),
    "resize": ("resized",),
    "decision": (),
    "strategy": (),
    "topology": ("topology",),
    "checkpoint": ("checkpoint",),
    "healed": ("healed", "rolled back", "wrong result", "computed again"),
    "notice": (
        "checkpoint failed",
        "checkpoint damaged",
        "checkpoint not finite",
        "skipped",
        "not formed",
        "not replaced",
        "no connection",
        "connected again",
        "left out",
        "not left out any more",
        "fault",
    ),
    "run": (
        "started",
        "resumed",
        "starts over",
        "coordinator restarted",
        "preempted",
        "finished",
        "over",
        "job changed",
        "agent joined",
        "agent left",
        "asked to stop",
        "asked to checkpoint",
    ),
}
"""Of each kind, which has a sign of its own on the page; those of some kinds have no event to themselves."""

KINDS = tuple(EVENTS)
KIND_OF = {event: kind for kind, events in EVENTS.items() for event in events}
KIND_OF_VERB = {"set_strategy": "strategy", "set_topology": "topology", "set_balance": "topology"}


class EventGroup(NamedTuple):
    """An event, or several of one kind one after the other.

    Attributes:
        time: the time of the first, in seconds since 1970.
        until: the time of the last.
        step: the step that its line names, if it does.
        many: the number of events.
        title: the newest one in a line.
        figures: the rest of its line, by name.
    """

    time: float
    until: float
    step: int | None
    many: int
    title: str
    figures: Mapping[str, str]


class Span(NamedTuple):
    """A generation, or several that followed each other quickly.

    Attributes:
        time: the time at which the first was formed, in seconds since 1970.
        number: the number of the newest.
        workers: the number of its workers.
        stall_s: the seconds for which training stood still until then.
        parts: these seconds, by what they were spent with.
        many: the number of generations.
    """

    time: float
    number: int
    workers: int
    stall_s: float
    parts: Mapping[str, float]
    many: int


@dataclass(frozen=True, slots=True)
class ShownWorker:
    """A worker of the present generation.

    Attributes:
        id: its id, or ``rank N`` in a job whose workers stay the same.
        host: the name of its host, if known.
        shards: the number of shards that it computes.
        colour: the number of its colour, which it keeps.
    """

    id: str
    host: str
    shards: int
    colour: int


@dataclass(slots=True)
class Story:
    """All that the journal tells.

    Attributes:
        shards: the number of shards of the job, as far as known.
        seats: the workers of the present generation, by rank.
        generation: its number; 0 before the first.
        spans: the generations.
        marks: the events, by kind.
        newest: the newest events of all kinds, each with its number and kind.
        told: the number of events so far.
        observed: the figures that policies have seen of the world outside.
        ended: the word with which the newest start has ended; empty while it trains.
    """

    shards: int = 0
    seats: tuple[ShownWorker, ...] = ()
    generation: int = 0
    spans: Thinned[Span] = field(default_factory=lambda: Thinned(_one_span, MOST_MARKS))
    marks: dict[str, Thinned[EventGroup]] = field(
        default_factory=lambda: {kind: Thinned(_one_happening, MOST_MARKS) for kind in KINDS}
    )
    newest: deque[tuple[int, str, EventGroup]] = field(default_factory=lambda: deque(maxlen=MOST_TOLD))
    told: int = 0
    observed: CurveTable = field(default_factory=CurveTable)
    ended: str = ""
    _hosts: dict[str, str] = field(default_factory=dict)
    _is_elastic: bool = False

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line; what is not as it should be in it is left out."""
        time, event = moment_of(line), line.get("event")
        if time is None or not isinstance(event, str):
            return
        match event:
            case "asked for":
                self._hosts |= dict.fromkeys(_names(line.get("workers")), _text(line.get("host")))
            case "minted":
                self._minted(line, time)
            case "formed":
                self._formed(line)
            case "started":
                self._started(line, time)
            case "observed":
                self._observed(line, time)
            case "finished" | "preempted" | "over":
                self.ended = _text(line.get("outcome")) or event
        if kind := _kind_of(line):
            self._mark(kind, time, line)

    def since(self, seen: dict[str, Mark]) -> dict[str, Any]:
        """For the browser: what somebody has not seen yet. Notes in ``seen`` that he has."""
        rows: dict[str, Thinned[Any]] = {f"marks/{kind}": marks for kind, marks in self.marks.items()}
        told = {}
        for name, groups in {"spans": self.spans, **rows}.items():
            before = seen.get(name, Mark())
            if groups.groups and before != groups.mark:
                first = groups.since(before)
                told[name] = {"first": first, "rows": [list(one) for one in groups.groups[first:]]}
                seen[name] = groups.mark
        return told

    # -- who trains

    def _minted(self, line: Mapping[str, Any], time: float) -> None:
        workers, generation = _names(line.get("workers")), line.get("generation")
        shards = line.get("shards")
        if not workers or type(generation) is not int or not isinstance(shards, list) or len(shards) != len(workers):
            return
        counts = [count if type(count) is int and 0 <= count <= MOST_WORKERS else 0 for count in shards]
        self._is_elastic, self.generation, self.ended = True, generation, ""
        self._seat(workers, counts)
        stall_s = number(line.get("seconds")) or 0.0
        self.spans.add(Span(time, generation, len(workers), stall_s, {"until all had arrived": stall_s}, 1))
        if len(self._hosts) > MOST_HOSTS:
            here = set(workers)
            self._hosts = {one: host for one, host in self._hosts.items() if one in here}

    def _formed(self, line: Mapping[str, Any]) -> None:
        seconds, spans = line.get("seconds"), self.spans.groups
        if not spans or not isinstance(seconds, Mapping) or spans[-1].number != line.get("generation"):
            return
        parts = {_text(name): found for name, value in list(seconds.items())[:16] if (found := number(value))}
        if spans[-1].many == 1:
            spans[-1] = spans[-1]._replace(stall_s=sum(parts.values()), parts=parts)
            self.spans.shape += 1  # it is not the newest group that changes

    def _started(self, line: Mapping[str, Any], time: float) -> None:
        size = line.get("world_size")
        if type(size) is not int or not 1 <= size <= MOST_WORKERS:
            return
        if self._is_elastic and not self.ended and size == len(self.seats):
            return  # the coordinator has told of them
        self._is_elastic, self.ended, self.generation = False, "", 1
        names = [f"rank {rank}" for rank in range(size)]
        even = Split.even(max(self.shards, size), size)
        self._seat(names, [len(even.of(rank)) for rank in range(size)])
        self.spans.add(Span(time, 1, size, 0.0, {}, 1))

    def _seat(self, workers: Sequence[str], shards: Sequence[int]) -> None:
        """Who stays keeps his colour, and who comes takes the first that nobody has."""
        known = {seat.id: seat.colour for seat in self.seats}
        taken = {known[worker] for worker in workers if worker in known}
        free = (colour for colour in range(len(workers)) if colour not in taken)
        self.seats = tuple(
            ShownWorker(worker, self._hosts.get(worker, ""), count, known[worker] if worker in known else next(free))
            for worker, count in zip(workers, shards, strict=True)
        )

    # -- what happened

    def _observed(self, line: Mapping[str, Any], time: float) -> None:
        figures, step = line.get("figures"), line.get("step")
        if isinstance(figures, Mapping) and type(step) is int and 0 <= step < LARGEST_STEP:
            named = {f"observed/{_text(name)}": value for name, value in list(figures.items())[:MOST_FIGURES]}
            self.observed.add([Entry(step, time, named)])

    def _mark(self, kind: str, time: float, line: Mapping[str, Any]) -> None:
        about = {name: value for name, value in line.items() if name not in ("event", "time")}
        figures = {_text(name): _text(value) for name, value in _flat(about)[:MOST_FIGURES]}
        step = line.get("step")
        known = step if type(step) is int and 0 <= step < LARGEST_STEP else None
        happening = EventGroup(time, time, known, 1, _text(_title_of(line)), figures)
        self.marks[kind].add(happening)
        self.told += 1
        self.newest.append((self.told, kind, happening))


def _one_span(one: Span, other: Span) -> Span:
    stall_s = one.stall_s + other.stall_s
    return other._replace(time=one.time, stall_s=stall_s, many=one.many + other.many)


def _one_happening(one: EventGroup, other: EventGroup) -> EventGroup:
    return other._replace(time=one.time, many=one.many + other.many)


def _names(value: Any) -> list[str]:
    found = value if isinstance(value, list) and len(value) <= MOST_WORKERS else []
    return [_text(one) for one in found]


def _flat(about: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The figures in a line, those of inner objects beside the others."""
    found: list[tuple[str, Any]] = []
    for name, value in about.items():
        found += value.items() if isinstance(value, Mapping) else [(name, value)]
    return found


def _text(value: Any) -> str:
    """Anything in a few words."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):  # of names, say; what lies deeper is not gone down into
        return ", ".join(short(one) if isinstance(one, list) else _text(one) for one in value[:32])[:LONGEST_TEXT]
    if value is None:
        return ""
    return (value if isinstance(value, str) else short(value))[:LONGEST_TEXT]


def _kind_of(line: Mapping[str, Any]) -> str:
    """The kind of an event; empty for one that is not shown."""
    event, verb = line.get("event"), line.get("verb")
    if event == "minted":
        return "join" if line.get("joined") and line.get("generation") != 1 else ""
    if event == "decided":
        return KIND_OF_VERB.get(verb, "decision") if isinstance(verb, str) else "decision"
    if event == "observed":
        figures = line.get("figures")
        return "notice" if isinstance(figures, Mapping) and figures.get("notices") else ""
    return KIND_OF.get(event, "") if isinstance(event, str) else ""


def _title_of(line: Mapping[str, Any]) -> str:
    """An event in a line, for people."""
    event = str(line.get("event"))
    who = line.get("worker") or line.get("agent") or line.get("policy") or line.get("error") or ""
    return title_of(line) or (f"{event}: {_text(who)}" if who else event)


# A run as the page shows it: live, late or over, made of the same lines.


SHOWN = 256
"""Workers that are shown one by one."""

LATEST = ("step", "epoch", "position", "loss", "lr", "learning_rate", "samples_per_s", "batch_size", "world_size")
JOB = ("batch_size", "shards", "seed", "threads", "precision", "reduction")
PREEMPTED = 75
LONGEST_WHY = 400


@dataclass(slots=True)
class Viewed:
    """What one viewer has seen.

    Attributes:
        edition: the edition of the model that he knows; 0 for none.
        told: the number of events that he has been told.
        marks: the known part of each row and table.
    """

    edition: int = 0
    told: int = 0
    marks: dict[str, Mark] = field(default_factory=dict)


class RunModel:
    """What is known of a run.

    Attributes:
        edition: a number that changes when a file turned out to be another one, and was read anew.
        story: what the journal tells.
        curves: what the metrics tell.
        stretches: the places of their steps in the file.
        status: what the coordinator says; None if there is none, or it does not answer.
        job: the job, by field.
        result: the end of the run, by field; empty before.
        is_behind: whether more of its history is about to be read.
        trouble: why nothing new is known, for people; empty if all is well.
    """

    def __init__(self) -> None:
        self.edition = 1
        self.story, self.curves, self.stretches = Story(), Curves(), Stretches()
        self.status: Mapping[str, Any] | None = None
        self.job: Mapping[str, Any] = {}
        self.result: Mapping[str, Any] = {}
        self.is_behind = False
        self.trouble = ""

    def take_journal(self, lines: Sequence[Mapping[str, Any]], *, anew: bool) -> None:
        """Take the next lines of the journal, or its first ones."""
        if anew:
            self.story, self.edition = Story(), self.edition + 1
        shards = self.job.get("shards")
        self.story.shards = shards if type(shards) is int and 0 < shards <= 65536 else 0
        for line in lines:
            self.story.add(line)

    def take_metrics(self, news: NewLines) -> None:
        """Take the next lines of the metrics, or its first ones."""
        if news.anew:
            self.curves, self.stretches, self.edition = Curves(), Stretches(), self.edition + 1
        self.stretches.add(news)
        self.curves.take(news.lines)

    def news_for(self, seen: Viewed) -> dict[str, Any]:
        """What a viewer has not seen yet, for the browser; notes that he has."""
        anew = seen.edition != self.edition
        if anew:
            seen.edition, seen.told, seen.marks = self.edition, 0, {}
        events = [[kind, *one] for number, kind, one in self.story.newest if number > seen.told]
        seen.told = self.story.told
        rows, curves = self.story.since(seen.marks), {}
        for name, table in (("metrics", self.curves.table), ("observed", self.story.observed)):
            if told := table.since(seen.marks.get(name, Mark())):
                curves[name], seen.marks[name] = told, table.mark
        return {"anew": anew, "head": self.head(), "events": events, "rows": rows, "curves": curves}

    def head(self) -> dict[str, Any]:
        """What is now: small, and sent whole each time."""
        latest, status = self.curves.latest, self.status
        seconds = latest.get("seconds")
        workers = self._workers()
        return {
            "state": self.state,
            "why": self._why,
            "behind": self.is_behind,
            "trouble": self.trouble,
            "generation": self.story.generation,
            "latest": {name: number(latest.get(name)) for name in LATEST},
            "seconds": {name: number(seconds.get(name)) for name in PARTS} if isinstance(seconds, dict) else {},
            "workers": workers[:SHOWN],
            "more": max(0, len(workers) - SHOWN),
            "job": {name: _plain(self.job.get(name)) for name in JOB},
            "sizes": None if status is None else {name: status[name] for name in ("wanted", "smallest", "largest")},
            "hosts": [] if status is None else status["agents"][:SHOWN],
            "digest": _said(self.result.get("weights_sha256"))[:64],
        }

    @property
    def state(self) -> str:
        """In a word."""
        code = self.result.get("exit_code")
        if type(code) is int:
            return "done" if code == 0 else "stopped" if code == PREEMPTED else "failed"
        if self.status is not None:
            return str(self.status["phase"])
        return self.story.ended or ("training" if self.curves.latest else "starting")

    @property
    def _why(self) -> str:
        error = self.result.get("error")
        return _said(error.get("message"), LONGEST_WHY) if isinstance(error, Mapping) else ""

    def _workers(self) -> list[dict[str, Any]]:
        """Those who train, by rank, and those who are about to."""
        seats, status = self.story.seats, self.status
        times = shard_seconds(self.curves.latest) if self._tells_of(seats) else []
        told = {} if status is None else {one["id"]: one for one in [*status["members"], *status["others"]]}
        rows = []
        for rank, seat in enumerate(seats):
            about = told.pop(seat.id, {})
            seconds = times[rank] if rank < len(times) else None
            phase = _phase(about, "" if status is None else "gone")
            where = {"id": seat.id, "rank": rank, "host": about.get("host") or seat.host, "phase": phase}
            rows.append({**where, "shards": seat.shards, "colour": seat.colour, "shard_s": seconds})
        for name, about in told.items():
            where = {"id": name, "rank": None, "host": about["host"], "phase": _phase(about)}
            rows.append({**where, "shards": 0, "colour": None, "shard_s": None})
        return rows

    def _tells_of(self, seats: Sequence[ShownWorker]) -> bool:
        """Whether the newest line is of these workers."""
        latest = self.curves.latest
        return latest.get("generation") == self.story.generation and latest.get("world_size") == len(seats)


def _plain(value: Any) -> Any:
    """A value of the job as the browser gets it; None for one that is no number or word."""
    return value if type(value) in (bool, int) else number(value) if isinstance(value, float) else _said(value) or None


def _said(value: Any, most: int = LONGEST_TEXT) -> str:
    return value[:most] if isinstance(value, str) else ""


def _phase(about: Mapping[str, Any], unknown: str = "") -> str:
    phase = str(about.get("phase", unknown))
    return "leaving" if about.get("leaving") and phase in ("working", "arrived") else phase
