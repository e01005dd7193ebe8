"""The critical path of a step: the work and the transfers of which each had to wait for the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal

from unisono_lab.timeline.recorded import PlacedSpan, WorkerStep

Part = Literal["data", "forward", "backward", "compute", "communication", "update", "regroup", "script"]
"""What a worker's time is spent on. ``compute`` is what belongs to the shards besides their two passes, and ``script``
is the rest: the loop's body, checks, evaluations."""

PART_OF: Final[Mapping[str, Part]] = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "compute": "compute",
    "update": "update",
    "step": "script",
    **dict.fromkeys(("exposed", "exchange", "weigh", "reduce", "synchronise"), "communication"),
    **dict.fromkeys(("regroup", "wait", "form", "copy"), "regroup"),
}

AROUND = frozenset({"step", "compute", "exposed", "regroup"})
"""What holds other spans."""

MEETINGS = frozenset({"weigh", "reduce", "exchange"})
"""What no worker ends before all have begun it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time of one worker.

    Attributes:
        worker: the worker, by its place among those of the step.
        part: what it was spent on.
        begun: the beginning, in nanoseconds.
        ended: the end.
    """

    worker: int
    part: Part
    begun: int
    ended: int

    @property
    def seconds(self) -> float:
        """The length."""
        return (self.ended - self.begun) / 1e9


@dataclass(frozen=True)
class Lane:
    """What a worker did in one step, on the thread that trains and on the reducer's.

    Attributes:
        worker: the worker's place.
        step: its spans.
    """

    worker: int
    step: WorkerStep

    @cached_property
    def segments(self) -> Sequence[Stretch]:
        """The time of the thread that trains, without gaps, each moment by the innermost span."""
        spans = [span for span in self.step.spans if span.on_main]
        edges = sorted({edge for span in spans for edge in (span.begun, span.ended)})
        found = list[Stretch]()
        for begun, ended in pairwise(edges):
            inside = [span for span in spans if span.begun <= begun and ended <= span.ended]
            part = PART_OF[min(inside, key=_depth).kind] if inside else "script"
            if found and found[-1].part == part and part != "communication":
                found[-1] = Stretch(self.worker, part, found[-1].begun, ended)
            else:
                found.append(Stretch(self.worker, part, begun, ended))
        return found

    @cached_property
    def meetings(self) -> Mapping[tuple[str, int], PlacedSpan]:
        """Where it met the others, by kind and number; of a step that was computed again, the last time."""
        return {(span.kind, span.number): span for span in self.step.spans if span.kind in MEETINGS}

    @property
    def begun(self) -> int:
        """When its step began."""
        return min((span.begun for span in self.step.all("step")), default=self.step.begun)

    @property
    def ended(self) -> int:
        """When its step was over."""
        return max((span.ended for span in self.step.all("step")), default=self.step.ended)

    def segment_before(self, at: int) -> Stretch | None:
        """What it did just before a moment."""
        return next((one for one in reversed(self.segments) if one.begun < at), None)

    def meeting_before(self, at: int) -> tuple[str, int] | None:
        """The last meeting that it had left at a moment."""
        known = [(span.ended, key) for key, span in self.meetings.items() if span.ended <= at]
        return max(known, default=(0, None))[1]


def _depth(span: PlacedSpan) -> tuple[int, bool]:
    """The smaller, the deeper a span lies; what holds others lies above one of its own length."""
    return span.took, span.kind in AROUND


def critical_path(step: Mapping[int, WorkerStep]) -> list[Stretch]:
    """The critical path of a step, from its beginning to its end.

    It is found from the end, on the worker that was ready last. Where a worker waits for others, the path goes on with
    the one that came last to the meeting which ended the wait.

    Args:
        step: what each worker did in it.
    """
    lanes = {worker: Lane(worker, each) for worker, each in step.items()}
    found = list(_backwards(lanes))
    joined = list[Stretch]()
    for each in reversed(found):
        last = joined[-1] if joined else None
        if last is not None and (last.worker, last.part) == (each.worker, each.part):
            joined[-1] = Stretch(each.worker, each.part, last.begun, each.ended)
        else:
            joined.append(each)
    return joined


def _backwards(lanes: Mapping[int, Lane]) -> Iterator[Stretch]:
    lane = max(lanes.values(), key=lambda each: each.ended)
    at = lane.ended
    while at > lane.begun and (segment := lane.segment_before(at)) is not None:
        if segment.part != "communication":
            yield Stretch(lane.worker, segment.part, segment.begun, at)
            at = segment.begun
            continue
        last, came = _waited_for(lanes, lane, segment, at)
        yield Stretch(lane.worker, "communication", came, at)
        lane, at = last, came


def _waited_for(lanes: Mapping[int, Lane], lane: Lane, segment: Stretch, at: int) -> tuple[Lane, int]:
    """For whom a worker waited at a moment, and when that one had come so far; itself if for nobody."""
    came = segment.begun
    while (key := lane.meeting_before(at)) is not None and lane.meetings[key].ended > segment.begun:
        there = [each for each in lanes.values() if key in each.meetings]
        lane = max(there, key=lambda each: each.meetings[key].begun)
        meeting = lane.meetings[key]
        came = at = min(meeting.begun, at - 1)
        before = lane.meeting_before(at)
        if not meeting.ready or before is None or lane.meetings[before].ended <= meeting.ready:
            return lane, min(came, meeting.ready or came)  # it was not ready before
        segment = Stretch(lane.worker, "communication", lane.begun, at)  # its reducer had others to reduce first
    return lane, came


def shares(path: Sequence[Stretch]) -> dict[Part, float]:
    """What part of a path each kind of work takes; the largest first."""
    whole = sum(each.seconds for each in path) or 1.0
    found: dict[Part, float] = {}
    for each in path:
        found[each.part] = found.get(each.part, 0.0) + each.seconds / whole
    return dict(sorted(found.items(), key=lambda item: -item[1]))
