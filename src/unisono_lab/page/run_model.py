"""A run as the page shows it: live, late or over, made of the same lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono_lab.page.curves import PARTS, Curves, number, shard_seconds
from unisono_lab.page.finer import Stretches
from unisono_lab.page.follow import NewLines
from unisono_lab.page.story import LONGEST_TEXT, ShownWorker, Story
from unisono_lab.page.thinned import Mark

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
            rows.append(_row(seat.id, rank, about.get("host") or seat.host, phase, seat.shards, seat.colour, seconds))
        rows += [_row(name, None, about["host"], _phase(about)) for name, about in told.items()]
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


def _row(
    name: str,
    rank: int | None,
    host: str,
    phase: str,
    shards: int = 0,
    colour: int | None = None,
    shard_s: float | None = None,
) -> dict[str, Any]:
    where = {"id": name, "rank": rank, "host": host, "phase": phase}
    return {**where, "shards": shards, "colour": colour, "shard_s": shard_s}


def _phase(about: Mapping[str, Any], unknown: str = "") -> str:
    phase = str(about.get("phase", unknown))
    return "leaving" if about.get("leaving") and phase in ("working", "arrived") else phase
