"""``unisono timeline``: what each worker did when. Loaded when it is called: no other command reads spans."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unisono.cli.completion import run_folders
from unisono.cli.options import grouped, opt
from unisono.cli.tables import bare_table, show_table
from unisono.jsonl import to_json
from unisono_lab.report.drawing import require_drawable, save
from unisono_lab.report.step_picture import step_figure
from unisono_lab.timeline.chrome import chrome_trace, write
from unisono_lab.timeline.explanation import NAMES, Explanation, explained, parts_of
from unisono_lab.timeline.recorded import StepTimelines, read

TRACE = "timeline.json"
"""In the run folder, unless somebody names another file."""


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """The options of this command."""

    out: Annotated[Path | None, opt(metavar="FILE")] = None
    """The Chrome trace to write; by default timeline.json in the run folder."""
    plot: Annotated[Path | None, opt(metavar="FILE")] = None
    """Draw the median step, too: .png, .svg or .pdf. Needs matplotlib."""
    as_json: Annotated[bool, opt("--json")] = False
    """Print JSON, for programs."""


@grouped
def timeline(
    runs: Annotated[
        list[Path],
        typer.Argument(
            autocompletion=run_folders,
            metavar="RUN…",
            help="The run folder; one for each host, where hosts have their own.",
        ),
    ],
    *,
    own: TimelineOptions,
) -> None:
    """Show what each worker did when, in a run that unisono run --timeline has recorded.

    Writes a Chrome trace, for ui.perfetto.dev or chrome://tracing, and says what takes the time of the median step.
    """
    if own.plot is not None:
        require_drawable(own.plot)
    timelines = read(runs)
    for words in timelines.left_out:
        typer.echo(f"unisono: {words}", err=True)
    found = explained(timelines)
    path = own.out or runs[0] / TRACE
    write(chrome_trace(timelines), path)
    if own.plot is not None:
        save(step_figure(timelines, found), own.plot)
    if own.as_json:
        typer.echo(to_json(_values(timelines, found)), nl=False)
    else:
        _show(timelines, found, [path, *([own.plot] if own.plot else [])])


def _show(timelines: StepTimelines, found: Explanation, written: Sequence[Path]) -> None:
    for words in found.words:
        typer.echo(words)
    show_table(_table(timelines, found), Console(highlight=False, emoji=False))
    for path in written:
        typer.echo(f"written: {path}")
    typer.echo("Open the trace in ui.perfetto.dev, which keeps it on this machine, or in chrome://tracing.")


def _table(timelines: StepTimelines, found: Explanation) -> Table:
    """The milliseconds of each worker in the median step, by part; parts that nobody has are left out."""
    rows = {place: parts_of(step) for place, step in found.workers.items()}
    parts = [part for part in NAMES if any(row[part] >= 5e-6 for row in rows.values())]
    head = ["ms of a worker", "shards", *(NAMES[part].replace(" ", "\n") for part in parts)]
    lines = [
        [timelines.workers[place].name, str(found.workers[place].shards), *(f"{row[part] * 1e3:.2f}" for part in parts)]
        for place, row in sorted(rows.items(), key=lambda item: found.workers[item[0]].rank)
    ]
    return bare_table(head, lines)


def _values(timelines: StepTimelines, found: Explanation) -> dict[str, object]:
    names = [worker.name for worker in timelines.workers]
    return {
        "step": found.step,
        "of": found.of,
        "seconds": found.seconds,
        "words": list(found.words),
        "workers": {names[place]: parts_of(step) for place, step in found.workers.items()},
        "critical_path": [
            {"worker": names[each.worker], "part": each.part, "seconds": each.seconds} for each in found.path
        ],
    }
