"""The steps of a run in words: where the time of the median step goes, and which worker is slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import mean, median
from typing import Final, Literal

from unisono.errors import JobError
from unisono_lab.recorded.worker_spans import PlacedSpan, StepTimelines, WorkerStep

# The critical path of a step: pieces of work and transfers, each of which waited for its predecessor.


Part = Literal["data", "forward", "backward", "compute", "communication", "update", "regroup", "script"]
"""The parts of a worker's time. ``compute`` is the work on shards besides their two passes, and ``script`` is the rest:
the loop's body, checks, evaluations."""

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
"""The kinds of spans that contain other spans."""

MEETINGS = frozenset({"weigh", "reduce", "exchange"})
"""The kinds of spans that no worker ends before all have begun them."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time of one worker.

    Attributes:
        worker: the worker's place among those of the step.
        begun: the beginning, in nanoseconds.
    """

    worker: int
    part: Part
    begun: int
    ended: int

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return (self.ended - self.begun) / 1e9


@dataclass(frozen=True)
class Lane:
    """The spans of one worker in one step, on the main thread and on the reducer's."""

    worker: int
    step: WorkerStep

    @cached_property
    def segments(self) -> Sequence[Stretch]:
        """The time of the main thread, without gaps; each moment belongs to the innermost span."""
        spans = [span for span in self.step.spans if span.on_main]
        edges = sorted({edge for span in spans for edge in (span.begun, span.ended)})
        segments = list[Stretch]()
        for begun, ended in pairwise(edges):
            inside = [span for span in spans if span.begun <= begun and ended <= span.ended]
            # The innermost span is the shortest; of two of one length, the one that may contain others is outside.
            part = PART_OF[min(inside, key=lambda span: (span.took, span.kind in AROUND)).kind] if inside else "script"
            if segments and segments[-1].part == part and part != "communication":
                segments[-1] = Stretch(self.worker, part, segments[-1].begun, ended)
            else:
                segments.append(Stretch(self.worker, part, begun, ended))
        return segments

    @cached_property
    def meetings(self) -> Mapping[tuple[str, int], PlacedSpan]:
        """The spans in which the worker met the others, by kind and number; of a repeated step, the last ones."""
        return {(span.kind, span.number): span for span in self.step.spans if span.kind in MEETINGS}

    @property
    def begun(self) -> int:
        """The moment at which the worker's step began."""
        return min((span.begun for span in self.step.all("step")), default=self.step.begun)

    @property
    def ended(self) -> int:
        """The moment at which the worker's step ended."""
        return max((span.ended for span in self.step.all("step")), default=self.step.ended)

    def segment_before(self, at: int) -> Stretch | None:
        """The stretch just before a moment."""
        return next((segment for segment in reversed(self.segments) if segment.begun < at), None)

    def meeting_before(self, at: int) -> tuple[str, int] | None:
        """The last meeting that the worker had left at a moment."""
        left = [(span.ended, key) for key, span in self.meetings.items() if span.ended <= at]
        return max(left, default=(0, None))[1]


def critical_path(step: Mapping[int, WorkerStep]) -> list[Stretch]:
    """The critical path of a step, from its beginning to its end.

    It is found from the end, beginning with the worker that ended last. Where a worker waits for others, the path
    continues with the worker that came last to the meeting which ended the wait.
    """
    lanes = {worker: Lane(worker, worker_step) for worker, worker_step in step.items()}
    path = list(_backwards(lanes))
    joined = list[Stretch]()
    for stretch in reversed(path):
        newest = joined[-1] if joined else None
        if newest is not None and (newest.worker, newest.part) == (stretch.worker, stretch.part):
            joined[-1] = Stretch(stretch.worker, stretch.part, newest.begun, stretch.ended)
        else:
            joined.append(stretch)
    return joined


def _backwards(lanes: Mapping[int, Lane]) -> Iterator[Stretch]:
    lane = max(lanes.values(), key=lambda candidate: candidate.ended)
    moment = lane.ended
    while moment > lane.begun and (segment := lane.segment_before(moment)) is not None:
        if segment.part != "communication":
            yield Stretch(lane.worker, segment.part, segment.begun, moment)
            moment = segment.begun
            continue
        waited_for, ready_at = _waited_for(lanes, lane, segment, moment)
        yield Stretch(lane.worker, "communication", ready_at, moment)
        lane, moment = waited_for, ready_at


def _waited_for(lanes: Mapping[int, Lane], lane: Lane, segment: Stretch, at: int) -> tuple[Lane, int]:
    """The worker for which a worker waited at a moment, and when it was ready; the same worker if it did not wait."""
    ready_at = segment.begun
    while (key := lane.meeting_before(at)) is not None and lane.meetings[key].ended > segment.begun:
        present = [other for other in lanes.values() if key in other.meetings]
        lane = max(present, key=lambda other: other.meetings[key].begun)
        meeting = lane.meetings[key]
        ready_at = at = min(meeting.begun, at - 1)
        earlier = lane.meeting_before(at)
        if not meeting.ready or earlier is None or lane.meetings[earlier].ended <= meeting.ready:
            return lane, min(ready_at, meeting.ready or ready_at)  # the wait was for this worker's own work
        segment = Stretch(lane.worker, "communication", lane.begun, at)  # its reducer was busy with an earlier meeting
    return lane, ready_at


def shares(path: Sequence[Stretch]) -> dict[Part, float]:
    """The share of each part in a path, the largest first."""
    total = sum(stretch.seconds for stretch in path) or 1.0
    parts: dict[Part, float] = {}
    for stretch in path:
        parts[stretch.part] = parts.get(stretch.part, 0.0) + stretch.seconds / total
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


# The steps of a run in words.


SLOW = 1.2
"""A worker is called slow if its shards take this multiple of the others' time."""

SMALLEST_SHARE = 0.05
"""The share of the path below which a part is not named."""

NAMES: Final[Mapping[Part, str]] = {
    "data": "waiting for samples",
    "forward": "forward passes",
    "backward": "backward passes",
    "compute": "other work on shards",
    "communication": "exposed communication",
    "update": "the update",
    "regroup": "regrouping",
    "script": "the loop's body and checks",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The median step of a run.

    Attributes:
        of: the number of steps of which it is the median: those of the generation with the most steps.
        workers: the spans of each worker in the step, by the worker's place.
    """

    step: int
    of: int
    seconds: float
    workers: Mapping[int, WorkerStep]
    path: Sequence[Stretch]
    words: Sequence[str]


def parts_of(step: WorkerStep) -> dict[Part, float]:
    """The seconds of a worker's step by part."""
    parts: dict[Part, float] = dict.fromkeys(NAMES, 0.0)
    lane = Lane(0, step)
    for segment in lane.segments:
        if segment.begun >= lane.begun:
            parts[segment.part] += segment.seconds
    return parts


def explained(timelines: StepTimelines) -> Explanation:
    """The median step, its critical path, and sentences about it.

    Raises:
        JobError: no step was taken by all workers of a generation.
    """
    steps = comparable(timelines)
    lengths = {number: _length(workers) for number, workers in steps.items()}
    number = sorted(lengths, key=lambda step: (lengths[step], step))[(len(lengths) - 1) // 2]
    path = critical_path(steps[number])
    first = (
        f"Step {number}, the median of {len(steps)}, takes {lengths[number] * 1e3:.3g} ms with {_crew(steps[number])}."
    )
    words = [first, *_parts(steps[number], path), *_slow(timelines, steps, number), *_unaligned(timelines)]
    return Explanation(number, len(steps), lengths[number], steps[number], path, words)


def comparable(timelines: StepTimelines) -> dict[int, dict[int, WorkerStep]]:
    """The steps of the generation with the most steps that all its workers took, without its first one.

    Raises:
        JobError: there is no such step.
    """
    complete = {
        number: workers
        for number, workers in timelines.by_step.items()
        if {worker.rank for worker in workers.values()} == set(range(next(iter(workers.values())).workers))
        and _length(workers) > 0  # the length of a damaged step is not recorded
    }
    by_generation: dict[int, list[int]] = {}
    for number, workers in complete.items():
        by_generation.setdefault(next(iter(workers.values())).generation, []).append(number)
    if not by_generation:
        raise JobError(
            "no step is recorded for all workers of its generation: if hosts have their own run folders, name all"
        )
    _, numbers = max(by_generation.items(), key=lambda item: (len(item[1]), item[0]))
    chosen = numbers[1:] if len(numbers) > 1 else numbers  # the first step allocates memory that later ones use again
    return {number: complete[number] for number in chosen}


def _crew(workers: Mapping[int, WorkerStep]) -> str:
    """The number of workers as text, and of their devices; spans are those of processes, one for each device."""
    count = next(iter(workers.values())).workers
    devices = len(workers) // count
    return f"{count} worker{'s' if count > 1 else ''}{f' of {devices} devices' if devices > 1 else ''}"


def _length(workers: Mapping[int, WorkerStep]) -> float:
    return max(worker.seconds("step") for worker in workers.values())


def _parts(workers: Mapping[int, WorkerStep], path: Sequence[Stretch]) -> list[str]:
    exposed = mean(parts_of(worker)["communication"] for worker in workers.values()) / _length(workers)
    parts = [f"{_percent(share)} {NAMES[part]}" for part, share in shares(path).items() if share >= SMALLEST_SHARE]
    return [
        f"{_percent(exposed)} of the step is exposed communication: transfers, and waits for other workers.",
        f"Its critical path: {', '.join(parts)}.",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _slow(timelines: StepTimelines, steps: Mapping[int, Mapping[int, WorkerStep]], number: int) -> list[str]:
    """Sentences about workers whose shards take longer than those of the others, or that have more shards."""
    shard_times: dict[int, list[float]] = {}
    for workers in steps.values():
        for place, step in workers.items():
            if shards := step.shards:
                shard_times.setdefault(place, []).append(step.seconds("compute") / shards)
    medians = {place: median(times) for place, times in shard_times.items()}
    sentences = []
    for place, seconds in sorted(medians.items()):
        other_times = [time for other, time in medians.items() if other != place]
        if other_times and seconds >= SLOW * median(other_times) > 0:
            name = _named(timelines, place, steps[number].get(place))
            sentences.append(
                f"Worker {name} is {seconds / median(other_times):.1f} times slower in compute than the others "
                f"({seconds * 1e3:.3g} ms for a shard)."
            )
    return sentences + _uneven(steps[number])


def _uneven(workers: Mapping[int, WorkerStep]) -> list[str]:
    counts = {place: step.shards for place, step in workers.items()}
    most, fewest = max(counts.values()), min(counts.values())
    if not 0 < fewest < most:
        return []
    workers_with_most = sum(count == most for count in counts.values())
    return [f"{workers_with_most} of {len(counts)} workers compute {most} shards; others compute {fewest}, and wait."]


def _named(timelines: StepTimelines, place: int, step: WorkerStep | None) -> str:
    worker = timelines.workers[place]
    if worker.worker.startswith("rank-") or step is None:
        return f"{worker.worker.removeprefix('rank-')} on host {worker.host}"
    return f"{worker.worker} (rank {step.rank}) on host {worker.host}"


def _unaligned(timelines: StepTimelines) -> list[str]:
    unknown = {worker.host for worker in timelines.workers if timelines.corrections.get(worker.clock) is None}
    if not unknown:
        return []
    return [f"The clock of host {', '.join(sorted(unknown))} is not known: its spans may be shifted."]
