"""The spans of workers as a Chrome trace, which Perfetto and ``chrome://tracing`` show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.errors import JobError, Unreadable
from unisono.received import LARGEST_JSON, open_file, parse_object, whole_number
from unisono.spans import CLOCK_MARK
from unisono_lab.timeline.explanation import critical_path
from unisono_lab.timeline.recorded import Correction, PlacedSpan, StepTimelines, WorkerStep

Event = Mapping[str, Any]

MAIN, REDUCER, PATH, TORCH = 1, 2, 3, 100
"""Threads of each worker's process: the one that trains, the reducer's, its parts of the critical paths, and from which
number on those that torch's profiler tells of."""

LONGEST_NAME = 1000

MOST_US = 1e18

NAMES = {
    "forward": "forward, shard {}",
    "backward": "backward, shard {}",
    "reduce": "reduce bucket {}",
    "exposed": "exposed communication",
    "exchange": "exchange of losses and flags",
    "weigh": "exchange of weights",
    "wait": "wait for the others",
    "form": "connect",
    "copy": "hand the state over",
}


def chrome_trace(timelines: StepTimelines) -> dict[str, Any]:
    """All spans, and the critical path of each step: one process per worker. Times are in microseconds.

    Raises:
        JobError: what torch's profiler has left cannot be read.
    """
    zero = min(step.begun for worker in timelines.workers for step in worker.steps)
    events = [*_paths(timelines, zero)]
    for place, worker in enumerate(timelines.workers):
        process = place + 1
        events += _named(process, worker.name, {MAIN: "trains", REDUCER: "reduces", PATH: "critical path"})
        events += [event for step in worker.steps for event in _spans(process, step, zero)]
        if worker.profile is not None:
            correction = timelines.corrections.get(worker.clock) or Correction()
            events += _profiled(process, worker.profile, correction, zero)
    about = {
        "clocks": {
            worker.host: None if found is None else f"right within {found.within / 1e6:.3f} ms"
            for worker in timelines.workers
            for found in (timelines.corrections.get(worker.clock),)
        }
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(process: int, name: str, threads: Mapping[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, what in threads.items():
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": what}}


def _spans(process: int, step: WorkerStep, zero: int) -> Iterator[Event]:
    args = {"step": step.step, "generation": step.generation, "rank": step.rank, "workers": step.workers}
    kind = "step" if step.is_done else "lost"
    for span in step.spans:
        thread = MAIN if span.on_main else REDUCER
        ready = {"waited_us": (span.begun - span.ready) / 1e3} if span.ready else {}
        cat = f"{span.kind},{kind}"
        yield _event(process, thread, _name(span, step.step), cat, span.begun - zero, span.ended - zero, args | ready)


def _name(span: PlacedSpan, step: int) -> str:
    if span.kind == "step":
        return f"step {step}"
    return NAMES.get(span.kind, span.kind).format(span.number)


def _paths(timelines: StepTimelines, zero: int) -> Iterator[Event]:
    for number, workers in timelines.by_step.items():
        for each in critical_path(workers):
            times = each.begun - zero, each.ended - zero
            yield _event(each.worker + 1, PATH, each.part, "critical path", *times, {"step": number})


def _event(process: int, thread: int, name: str, cat: str, begun: int, ended: int, args: Event) -> Event:
    times = {"ts": begun / 1e3, "dur": (ended - begun) / 1e3}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": cat, **times, "args": args}


# What torch's profiler has left.


def _profiled(process: int, file: Path, correction: Correction, zero: int) -> Iterator[Event]:
    try:
        with open_file(file) as opened:
            events = parse_object(opened.read(LARGEST_JSON + 1)).get("traceEvents")
    except (OSError, Unreadable) as error:
        raise JobError(f"{file} cannot be read: {error}; remove it to leave torch's events out") from error
    kept = [one for one in events if _is_sound(one)] if isinstance(events, list) else []
    marks = [
        (whole_number(one["name"].removeprefix(CLOCK_MARK)), one) for one in kept if one["name"].startswith(CLOCK_MARK)
    ]
    if not marks or marks[0][0] is None:
        raise JobError(f"{file} does not say what this host's clock showed; remove it to leave torch's events out")
    at, mark = marks[0]
    threads: dict[Any, int] = {}
    for one in kept:
        thread = threads.setdefault(f"{one.get('pid')}/{one.get('tid')}"[:LONGEST_NAME], TORCH + len(threads))
        begun = correction(at + round((one["ts"] - mark["ts"]) * 1e3)) - zero
        yield _event(process, thread, one["name"], "torch", begun, begun + round(one.get("dur", 0) * 1e3), {})
    for name, thread in threads.items():
        about = {"name": f"torch {name}"}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": about}


def _is_sound(event: Any) -> bool:
    """Whether it is a span of torch's with a name and times that can be shown."""
    if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return False
    return _is_time(event.get("ts")) and _is_time(event.get("dur", 0)) and len(event["name"]) <= LONGEST_NAME


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < MOST_US


def write(trace: Mapping[str, Any], path: Path) -> None:
    """Write a trace, in one piece.

    Raises:
        JobError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            json.dump(trace, file, separators=(",", ":"), allow_nan=False)
        beside.replace(path)
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error}") from error
