"""``unisono timeline``: the activities of each worker over time, in sentences and as a Chrome trace.

Perfetto and ``chrome://tracing`` show the trace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from unisono.cli.display import bare_table, show_table
from unisono.cli.options import grouped, opt, run_folders
from unisono.errors import JobError, Unreadable
from unisono.jsonl import to_json
from unisono.received import LARGEST_JSON, open_file, parse_object, whole_number
from unisono.spans import CLOCK_MARK
from unisono_lab.recorded.explanation import NAMES, Explanation, critical_path, explained, parts_of
from unisono_lab.recorded.worker_spans import Correction, StepTimelines, WorkerStep, read
from unisono_lab.report.drawing import replace_file, require_drawable, save

Event = Mapping[str, Any]

MAIN, REDUCER, PATH, TORCH = 1, 2, 3, 100
"""The thread numbers in each worker's process of the trace: the main thread, the reducer's, the worker's parts of the
critical paths, and the first of those that torch's profiler recorded."""

LONGEST_NAME = 1000

MOST_US = 1e18

TITLES = {
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
        JobError: the file of torch's profiler cannot be read.
    """
    zero = min(step.begun for worker in timelines.workers for step in worker.steps)
    events = [*_paths(timelines, zero)]
    for place, worker in enumerate(timelines.workers):
        process = place + 1
        events += _named(process, worker.name)
        events += [event for step in worker.steps for event in _spans(process, step, zero)]
        if worker.profile is not None:
            correction = timelines.corrections.get(worker.clock) or Correction()
            events += _profiled(process, worker.profile, correction, zero)
    about = {
        "clocks": {
            worker.host: None if correction is None else f"right within {correction.within / 1e6:.3f} ms"
            for worker in timelines.workers
            for correction in (timelines.corrections.get(worker.clock),)
        }
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(process: int, name: str) -> Iterator[Event]:
    about = {"pid": process, "ph": "M"}
    yield {**about, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {**about, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, title in {MAIN: "trains", REDUCER: "reduces", PATH: "critical path"}.items():
        yield {**about, "tid": thread, "name": "thread_name", "args": {"name": title}}


def _spans(process: int, step: WorkerStep, zero: int) -> Iterator[Event]:
    args = {"step": step.step, "generation": step.generation, "rank": step.rank, "workers": step.workers}
    kind = "step" if step.is_done else "lost"
    for span in step.spans:
        thread = MAIN if span.on_main else REDUCER
        ready = {"waited_us": (span.begun - span.ready) / 1e3} if span.ready else {}
        cat = f"{span.kind},{kind}"
        name = TITLES.get(span.kind, span.kind).format(span.number) if span.kind != "step" else f"step {step.step}"
        yield _event(process, thread, name, cat, span.begun - zero, span.ended - zero, args | ready)


def _paths(timelines: StepTimelines, zero: int) -> Iterator[Event]:
    for number, workers in timelines.by_step.items():
        for part in critical_path(workers):
            times = part.begun - zero, part.ended - zero
            yield _event(part.worker + 1, PATH, part.part, "critical path", *times, {"step": number})


def _event(process: int, thread: int, name: str, cat: str, begun: int, ended: int, args: Event) -> Event:
    times = {"ts": begun / 1e3, "dur": (ended - begun) / 1e3}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": cat, **times, "args": args}


def _profiled(process: int, file: Path, correction: Correction, zero: int) -> Iterator[Event]:
    try:
        with open_file(file) as opened:
            events = parse_object(opened.read(LARGEST_JSON + 1)).get("traceEvents")
    except (OSError, Unreadable) as error:
        raise JobError(f"{file} cannot be read: {error}; remove it to leave torch's events out") from error
    sound = [event for event in events if _is_sound(event)] if isinstance(events, list) else []
    marks = [
        (whole_number(event["name"].removeprefix(CLOCK_MARK)), event)
        for event in sound
        if event["name"].startswith(CLOCK_MARK)
    ]
    if not marks or marks[0][0] is None:
        raise JobError(f"{file} does not contain the time of this host's clock; remove it to leave torch's events out")
    marked_at, mark = marks[0]
    threads: dict[Any, int] = {}
    for event in sound:
        thread = threads.setdefault(f"{event.get('pid')}/{event.get('tid')}"[:LONGEST_NAME], TORCH + len(threads))
        begun = correction(marked_at + round((event["ts"] - mark["ts"]) * 1e3)) - zero
        yield _event(process, thread, event["name"], "torch", begun, begun + round(event.get("dur", 0) * 1e3), {})
    for name, thread in threads.items():
        about = {"name": f"torch {name}"}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": about}


def _is_sound(event: Any) -> bool:
    """Whether the event is a span of torch's profiler with a name and times that can be shown."""
    if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return False
    return _is_time(event.get("ts")) and _is_time(event.get("dur", 0)) and len(event["name"]) <= LONGEST_NAME


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < MOST_US


def write(trace: Mapping[str, Any], path: Path) -> None:
    """Write a trace; the file is replaced as a whole.

    Raises:
        JobError: the file cannot be written.
    """
    try:
        replace_file(path, json.dumps(trace, separators=(",", ":"), allow_nan=False).encode())
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error}") from error


TRACE = "timeline.json"
"""The default name of the trace, in the run folder."""


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """The options of this command."""

    out: Annotated[Path | None, opt(metavar="FILE")] = None
    """The Chrome trace to write; by default timeline.json in the run folder."""
    plot: Annotated[Path | None, opt(metavar="FILE")] = None
    """Also draw the median step into this .png, .svg or .pdf file. This needs matplotlib."""
    as_json: Annotated[bool, opt("--json")] = False
    """Print JSON, for programs."""


@grouped
def timeline(
    runs: Annotated[
        list[Path],
        typer.Argument(
            autocompletion=run_folders,
            metavar="RUN…",
            help="The run folder; if hosts have their own, one for each.",
        ),
    ],
    *,
    options: TimelineOptions,
) -> None:
    """Show the activities of each worker of a run over time.

    The run was recorded by unisono run --timeline. The command writes a Chrome trace, for ui.perfetto.dev or
    chrome://tracing, and explains the time of the median step.
    """
    if options.plot is not None:
        require_drawable(options.plot)
    timelines = read(runs)
    for words in timelines.left_out:
        typer.echo(f"unisono: {words}", err=True)
    explanation = explained(timelines)
    path = options.out or runs[0] / TRACE
    write(chrome_trace(timelines), path)
    if options.plot is not None:
        from unisono_lab.report.charts import step_figure  # loads numpy

        save(step_figure(timelines, explanation), options.plot)
    if options.as_json:
        typer.echo(to_json(_values(timelines, explanation)), nl=False)
        return
    for words in explanation.words:
        typer.echo(words)
    show_table(_table(timelines, explanation), Console(highlight=False, emoji=False))
    for written in filter(None, (path, options.plot)):
        typer.echo(f"written: {written}")
    typer.echo("Open the trace in ui.perfetto.dev, which keeps it on this machine, or in chrome://tracing.")


def _table(timelines: StepTimelines, explanation: Explanation) -> Table:
    """The milliseconds of each worker in the median step, by part, without parts that take no time."""
    workers = explanation.workers
    rows = {place: parts_of(step) for place, step in workers.items()}
    parts = [part for part in NAMES if any(row[part] >= 5e-6 for row in rows.values())]
    head = ["ms of a worker", "shards", *(NAMES[part].replace(" ", "\n") for part in parts)]
    lines = [
        [timelines.workers[place].name, str(workers[place].shards), *(f"{row[part] * 1e3:.2f}" for part in parts)]
        for place, row in sorted(rows.items(), key=lambda item: workers[item[0]].rank)
    ]
    return bare_table(head, lines)


def _values(timelines: StepTimelines, explanation: Explanation) -> dict[str, object]:
    names = [worker.name for worker in timelines.workers]
    return {
        "step": explanation.step,
        "of": explanation.of,
        "seconds": explanation.seconds,
        "words": list(explanation.words),
        "workers": {names[place]: parts_of(step) for place, step in explanation.workers.items()},
        "critical_path": [
            {"worker": names[part.worker], "part": part.part, "seconds": part.seconds} for part in explanation.path
        ],
    }
