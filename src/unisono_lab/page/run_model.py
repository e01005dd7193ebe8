"""The model of a run that the page shows, made from the lines of its files."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unisono.plan.split import Split
from unisono.received import short
from unisono_lab.journal_events import moment_of, title_of
from unisono_lab.page.curves import (
    LARGEST_STEP,
    PARTS,
    Curves,
    CurveTable,
    Entry,
    Mark,
    NewLines,
    Stretches,
    Thinned,
    number,
    shard_seconds,
)

# The events of a run, from the lines of ``journal.jsonl``: generations, workers, and marks on the time axis.


MOST_MARKS = 160
"""The most groups of events of each kind."""

MOST_LISTED = 60
"""The number of newest events that are listed."""

MOST_FIGURES, LONGEST_TEXT = 12, 200
MOST_WORKERS = 65536
MOST_HOSTS = 4096
"""The most workers whose hosts are remembered; of more, only those of the present generation."""


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
"""The events of each kind; each kind has its own sign on the page. Other fields decide on kinds without events."""

KINDS = tuple(EVENTS)
KIND_OF = {event: kind for kind, events in EVENTS.items() for event in events}
KIND_OF_VERB = {"set_strategy": "strategy", "set_topology": "topology", "set_balance": "topology"}


class EventGroup(NamedTuple):
    """An event, or several successive events of one kind.

    Attributes:
        time: the time of the first event, in seconds since 1970.
        until: the time of the last event.
        step: the step in the last event's line, if it has one.
        title: the last event as text.
        figures: the other fields of its line, as text.
    """

    time: float
    until: float
    step: int | None
    many: int
    title: str
    figures: Mapping[str, str]


class Span(NamedTuple):
    """A generation, or several successive ones.

    Attributes:
        time: the time at which the first generation was formed, in seconds since 1970.
        number: the number of the newest generation.
        workers: the number of workers of the newest generation.
        stall_s: the seconds for which training paused before.
        parts: the parts of these seconds, by name.
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
        id: the worker's id, or ``rank N`` in a job that is not elastic.
        colour: the number of its colour, which it keeps over generations.
    """

    id: str
    host: str
    shards: int
    colour: int


@dataclass(slots=True)
class Story:
    """The contents of the journal.

    Attributes:
        shards: the number of shards of the job; 0 if it is not known.
        seats: the workers of the present generation, by rank.
        generation: the number of the present generation; 0 before the first.
        newest: the newest events of all kinds, each with its number and kind.
        observed: the figures that policies have observed outside the run.
        ended: the outcome of the newest start; empty while it trains.
    """

    shards: int = 0
    seats: tuple[ShownWorker, ...] = ()
    generation: int = 0
    spans: Thinned[Span] = field(default_factory=lambda: Thinned(_merged_spans, MOST_MARKS))
    marks: dict[str, Thinned[EventGroup]] = field(
        default_factory=lambda: {kind: Thinned(_merged_groups, MOST_MARKS) for kind in KINDS}
    )
    newest: deque[tuple[int, str, EventGroup]] = field(default_factory=lambda: deque(maxlen=MOST_LISTED))
    event_count: int = 0
    observed: CurveTable = field(default_factory=CurveTable)
    ended: str = ""
    _hosts: dict[str, str] = field(default_factory=dict)
    _is_elastic: bool = False

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line; values that are not valid are left out."""
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
        """The rows that a viewer has not seen, for the browser; updates ``seen``."""
        rows: dict[str, Thinned[Any]] = {f"marks/{kind}": marks for kind, marks in self.marks.items()}
        unseen = {}
        for name, groups in {"spans": self.spans, **rows}.items():
            mark = seen.get(name, Mark())
            if groups.groups and mark != groups.mark:
                first = groups.since(mark)
                unseen[name] = {"first": first, "rows": [list(row) for row in groups.groups[first:]]}
                seen[name] = groups.mark
        return unseen

    # -- workers and generations

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
            present = set(workers)
            self._hosts = {worker: host for worker, host in self._hosts.items() if worker in present}

    def _formed(self, line: Mapping[str, Any]) -> None:
        seconds, spans = line.get("seconds"), self.spans.groups
        if not spans or not isinstance(seconds, Mapping) or spans[-1].number != line.get("generation"):
            return
        parts = {_text(name): amount for name, value in list(seconds.items())[:16] if (amount := number(value))}
        if spans[-1].many == 1:
            spans[-1] = spans[-1]._replace(stall_s=sum(parts.values()), parts=parts)
            self.spans.shape += 1  # a group that viewers have seen has changed

    def _started(self, line: Mapping[str, Any], time: float) -> None:
        size = line.get("world_size")
        if type(size) is not int or not 1 <= size <= MOST_WORKERS:
            return
        if self._is_elastic and not self.ended and size == len(self.seats):
            return  # a line of the coordinator has named them
        self._is_elastic, self.ended, self.generation = False, "", 1
        names = [f"rank {rank}" for rank in range(size)]
        even = Split.even(max(self.shards, size), size)
        self._seat(names, [len(even.of(rank)) for rank in range(size)])
        self.spans.add(Span(time, 1, size, 0.0, {}, 1))

    def _seat(self, workers: Sequence[str], shards: Sequence[int]) -> None:
        """Set the workers: those that stay keep their colours, and joiners get the first free ones."""
        colours = {seat.id: seat.colour for seat in self.seats}
        taken = {colours[worker] for worker in workers if worker in colours}
        free = (colour for colour in range(len(workers)) if colour not in taken)
        self.seats = tuple(
            ShownWorker(
                worker, self._hosts.get(worker, ""), count, colours[worker] if worker in colours else next(free)
            )
            for worker, count in zip(workers, shards, strict=True)
        )

    # -- events

    def _observed(self, line: Mapping[str, Any], time: float) -> None:
        figures, step = line.get("figures"), line.get("step")
        if isinstance(figures, Mapping) and type(step) is int and 0 <= step < LARGEST_STEP:
            named = {f"observed/{_text(name)}": value for name, value in list(figures.items())[:MOST_FIGURES]}
            self.observed.add([Entry(step, time, named)])

    def _mark(self, kind: str, time: float, line: Mapping[str, Any]) -> None:
        fields = {name: value for name, value in line.items() if name not in ("event", "time")}
        figures = {_text(name): _text(value) for name, value in _flat(fields)[:MOST_FIGURES]}
        step = line.get("step")
        valid_step = step if type(step) is int and 0 <= step < LARGEST_STEP else None
        group = EventGroup(time, time, valid_step, 1, _text(_title_of(line)), figures)
        self.marks[kind].add(group)
        self.event_count += 1
        self.newest.append((self.event_count, kind, group))


def _merged_spans(earlier: Span, later: Span) -> Span:
    stall_s = earlier.stall_s + later.stall_s
    return later._replace(time=earlier.time, stall_s=stall_s, many=earlier.many + later.many)


def _merged_groups(earlier: EventGroup, later: EventGroup) -> EventGroup:
    return later._replace(time=earlier.time, many=earlier.many + later.many)


def _names(value: Any) -> list[str]:
    names = value if isinstance(value, list) and len(value) <= MOST_WORKERS else []
    return [_text(name) for name in names]


def _flat(about: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The fields of a line; those of inner objects stand beside the others."""
    fields: list[tuple[str, Any]] = []
    for name, value in about.items():
        fields += value.items() if isinstance(value, Mapping) else [(name, value)]
    return fields


def _text(value: Any) -> str:
    """Any value as a short text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):  # for example of names; lists in it are not expanded
        return ", ".join(short(item) if isinstance(item, list) else _text(item) for item in value[:32])[:LONGEST_TEXT]
    if value is None:
        return ""
    return (value if isinstance(value, str) else short(value))[:LONGEST_TEXT]


def _kind_of(line: Mapping[str, Any]) -> str:
    """The kind of an event; empty for an event that is not shown."""
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
    event = str(line.get("event"))
    name = line.get("worker") or line.get("agent") or line.get("policy") or line.get("error") or ""
    return title_of(line) or (f"{event}: {_text(name)}" if name else event)


# The model of a run.


SHOWN = 256
"""The most workers that are shown one by one."""

LATEST = ("step", "epoch", "position", "loss", "lr", "learning_rate", "samples_per_s", "batch_size", "world_size")
JOB = ("batch_size", "shards", "seed", "threads", "precision", "reduction")
PREEMPTED = 75
LONGEST_WHY = 400


@dataclass(slots=True)
class Viewed:
    """The part of the model that one viewer has seen.

    Attributes:
        edition: the edition of the model that the viewer has; 0 for none.
        marks: the mark of the seen part of each row and table.
    """

    edition: int = 0
    event_count: int = 0
    marks: dict[str, Mark] = field(default_factory=dict)


class RunModel:
    """The model of a run.

    Attributes:
        edition: a number that changes when a file was replaced, and is read anew.
        status: the status of the coordinator; None if there is none, or it does not answer.
        result: the fields of ``result.json``; empty before the end.
        is_behind: whether more of the history is yet to be read.
        trouble: the error message if the run cannot be read; empty if it can.
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
        """The news for a viewer's browser; updates ``seen``."""
        anew = seen.edition != self.edition
        if anew:
            seen.edition, seen.event_count, seen.marks = self.edition, 0, {}
        events = [[kind, *group] for number, kind, group in self.story.newest if number > seen.event_count]
        seen.event_count = self.story.event_count
        rows, curves = self.story.since(seen.marks), {}
        for name, table in (("metrics", self.curves.table), ("observed", self.story.observed)):
            if points := table.since(seen.marks.get(name, Mark())):
                curves[name], seen.marks[name] = points, table.mark
        return {"anew": anew, "head": self.head(), "events": events, "rows": rows, "curves": curves}

    def head(self) -> dict[str, Any]:
        """The present state, which is small, and sent as a whole each time."""
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
            "digest": _str(self.result.get("weights_sha256"))[:64],
        }

    @property
    def state(self) -> str:
        """The state of the run in a word."""
        code = self.result.get("exit_code")
        if type(code) is int:
            return "done" if code == 0 else "stopped" if code == PREEMPTED else "failed"
        if self.status is not None:
            return str(self.status["phase"])
        return self.story.ended or ("training" if self.curves.latest else "starting")

    @property
    def _why(self) -> str:
        error = self.result.get("error")
        return _str(error.get("message"), LONGEST_WHY) if isinstance(error, Mapping) else ""

    def _workers(self) -> list[dict[str, Any]]:
        """The workers of the present generation, by rank, and those that are about to join."""
        seats, status = self.story.seats, self.status
        times = shard_seconds(self.curves.latest) if self._has_metrics_of(seats) else []
        known = {} if status is None else {worker["id"]: worker for worker in [*status["members"], *status["others"]]}
        rows = []
        for rank, seat in enumerate(seats):
            about = known.pop(seat.id, {})
            seconds = times[rank] if rank < len(times) else None
            phase = _phase(about, "" if status is None else "gone")
            where = {"id": seat.id, "rank": rank, "host": about.get("host") or seat.host, "phase": phase}
            rows.append({**where, "shards": seat.shards, "colour": seat.colour, "shard_s": seconds})
        for name, about in known.items():
            where = {"id": name, "rank": None, "host": about["host"], "phase": _phase(about)}
            rows.append({**where, "shards": 0, "colour": None, "shard_s": None})
        return rows

    def _has_metrics_of(self, seats: Sequence[ShownWorker]) -> bool:
        """Whether the newest line of metrics is that of these workers."""
        latest = self.curves.latest
        return latest.get("generation") == self.story.generation and latest.get("world_size") == len(seats)


def _plain(value: Any) -> Any:
    """A value of the job for the browser; None if it is neither a number nor a text."""
    return value if type(value) in (bool, int) else number(value) if isinstance(value, float) else _str(value) or None


def _str(value: Any, most: int = LONGEST_TEXT) -> str:
    return value[:most] if isinstance(value, str) else ""


def _phase(about: Mapping[str, Any], unknown: str = "") -> str:
    phase = str(about.get("phase", unknown))
    return "leaving" if about.get("leaving") and phase in ("working", "arrived") else phase
