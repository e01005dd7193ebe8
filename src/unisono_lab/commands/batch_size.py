"""``unisono batch-size``: the largest batch that fits into memory, and the fastest."""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.cli.display import bare_table, show_table
from unisono.cli.options import Module, ScriptName, Starting, grouped, opt
from unisono.errors import JobError
from unisono.host.machine import MIB, read_limits, room_mib
from unisono.launch.local import Launcher
from unisono.launch.settings import LaunchSettings, Script
from unisono_lab.commands.study import STUDIES, ScriptArgs, StudyCommand, report_interrupt

if TYPE_CHECKING:
    from unisono_lab.study.batch_search import BatchRunner, BatchSearch
    from unisono_lab.study.results import BatchCurve, Tried

ROOM_SHARE = 0.9
"""The share of the free memory that trials may use if no limit is given; other programs may use the rest."""

LEAST_STEPS = 3
"""The fewest steps of a trial: the optimizer allocates its state in the first step, so the peak comes after it."""


app = typer.Typer()


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of this command."""

    workers: Annotated[int, opt("-n", "--workers")] = 1
    """The number of workers; each gets the whole batch of a trial."""
    memory_limit: Annotated[str | None, opt(metavar="SIZE")] = None
    """The host memory that each worker may use, such as 2GiB; by default an equal share of the free memory."""
    first: Annotated[int, opt("--from")] = 16
    """The first batch per worker to try."""
    most: Annotated[int | None, opt()] = None
    """The largest batch per worker to try."""
    steps: Annotated[int, opt()] = 20
    """The number of steps of each trial."""
    margin: Annotated[float, opt()] = 0.1
    """The safety margin: recommend a batch smaller than the largest by this share."""
    json: Annotated[Path | None, opt(metavar="FILE")] = None
    """The file for the figures; by default a file that unisono study finds."""
    module: Module = False


@app.command(cls=StudyCommand)
@grouped
def batch_size(
    script: ScriptName,
    args: ScriptArgs = None,
    *,
    search_options: SearchOptions,
    options: Starting,
) -> None:
    """Find the largest and the fastest batch per worker.

        unisono batch-size train.py -n 2 --memory-limit 2GiB -- --lr 0.1

    The script runs unchanged with each batch, in new processes. The exit code is 0 if a batch fits, and 1 if no batch
    fits or the script fails.
    """
    from unisono_lab.study.batch_search import BatchRunner, BatchSearch
    from unisono_lab.study.engines import TRIAL_GRACE_S
    from unisono_lab.study.results import FAILED_NAME

    search = BatchSearch(search_options.workers, search_options.first, search_options.most, search_options.margin)
    search.check()
    if search_options.steps < LEAST_STEPS:
        raise JobError(f"--steps {search_options.steps}: a trial needs at least {LEAST_STEPS} to show its memory")
    share = ROOM_SHARE * room_mib(read_limits()) / search_options.workers
    limit = share if search_options.memory_limit is None else read_mib(search_options.memory_limit)
    target = Script(script, tuple(args or ()), is_module=search_options.module)
    settings = LaunchSettings.tuned(target, options, workers=search_options.workers, memory_limit_mib=limit)
    settings = settings.with_options({"launch.grace_s": TRIAL_GRACE_S})
    settings.check()
    path = file_of(search_options.json, settings.script.stem)
    raise typer.Exit(start(search, BatchRunner(settings, search_options.steps, path.parent / FAILED_NAME), path))


def read_mib(text: str) -> float:
    """``2GiB``, ``500 MB`` or a number of bytes, in MiB.

    Raises:
        JobError: the text is no size.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = ByteSize(0)
    if size <= 0:
        raise JobError(f"--memory-limit {text}: needs a size, such as 2GiB, 500MiB or 1.5GB")
    return size / MIB


def start(search: BatchSearch, runner: BatchRunner, path: Path) -> int:
    """Search, print, and write the figures into a file; returns the exit code.

    Raises:
        JobError: the file cannot be written, or the script takes no steps.
        LaunchError: the script failed for another reason than its memory.
    """
    from unisono_lab.study.batch_search import searched

    err = Console(stderr=True, highlight=False, emoji=False)
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-batch-size-") as folder, Launcher(share=True) as launcher:
            curve = searched(
                search,
                partial(runner.attempt, launcher=launcher, folder=Path(folder)),
                lambda tried: err.print(Text(line(tried)), soft_wrap=True),
                runner.settings.memory_limit_mib,
                shlex.join(["unisono", *sys.argv[1:]]),
            )
    except KeyboardInterrupt as interrupt:
        return report_interrupt(interrupt, "no figures are kept", err)
    report(curve, path)
    return 1 if curve.largest is None else 0


# The output of ``unisono batch-size``, and the file that it writes.

ENDS = {
    "memory": "larger batches do not fit into memory",
    "data": "the data set has no more samples for a step",
    "most": "--most allows no larger batch",
}


def file_of(requested: Path | None, stem: str) -> Path:
    """The file of the figures; by default in the folder of the script's study.

    Raises:
        JobError: the file cannot be written.
    """
    from unisono_lab.study.results import BATCHES_NAME

    path = requested or STUDIES / stem / BATCHES_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()  # fail now, and not after an hour of trials
        if path.stat().st_size == 0:
            path.unlink()
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error}; name another file with --json") from error
    return path


def line(tried: Tried) -> str:
    """The result of a trial, in one line."""
    from unisono_lab.study.estimate import number  # loads numpy, which starts a thread; a fork server must have none

    if not tried.fits:
        return f"batch {tried.batch}: does not fit: {tried.words}"
    memory = "" if tried.peak_mib is None else f", {number(tried.peak_mib)} MiB"
    speed = "" if tried.samples_per_s is None else f", {number(tried.samples_per_s)} samples/s"
    return f"batch {tried.batch}: fits{memory}{speed}"


def report(curve: BatchCurve, path: Path) -> None:
    """Print the answer and the trials, and write both into a file.

    Raises:
        JobError: the file cannot be written.
    """
    from unisono.checkpoint.folder import write_json

    out = Console(highlight=False, emoji=False)
    out.print()
    show_table(_table(curve), out)
    out.print()
    for words in answer(curve):
        out.print(Text(words, "bold"), soft_wrap=True)
    try:
        write_json(path, curve.model_dump(mode="json"))
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error}; name another file with --json") from error
    out.print(Text(f"figures: {path}", "dim"), soft_wrap=True)


def answer(curve: BatchCurve) -> list[str]:
    """The answer in sentences."""
    from unisono_lab.study.estimate import counted, number, percent

    limit = "" if curve.memory_limit_mib is None else f" (limit: {curve.memory_limit_mib:.0f} MiB of the host's memory)"
    if curve.largest is None:
        smallest = min(curve.rows, key=lambda row: row.batch)
        return [f"no batch fits, not even {_batch(smallest.batch, curve.workers)}{limit}: {smallest.words}"]
    ends = ENDS[curve.bound] + (limit if curve.bound == "memory" else "")
    sentences = [f"largest batch that fits: {_batch(curve.largest, curve.workers)}; {ends}"]
    if curve.with_margin is not None and curve.with_margin != curve.largest:
        sentences.append(f"with a margin of {percent(curve.margin)}: {_batch(curve.with_margin, curve.workers)}")
    if curve.best is None:
        return [*sentences, "no trial could be timed: the script takes too few steps"]
    rate = next(row.samples_per_s for row in curve.rows if row.batch == curve.best)
    return [
        *sentences,
        f"best throughput: {_batch(curve.best, curve.workers)}, {number(rate)} samples/s",
        f"recommended: unisono.init(batch_size={curve.best * curve.workers}) with {counted(curve.workers, 'worker')}",
    ]


def _batch(batch: int, workers: int) -> str:
    return f"{batch}" if workers == 1 else f"{batch} per worker, {batch * workers} in all"


def _table(curve: BatchCurve) -> Table:
    from unisono_lab.study.estimate import number

    marks = (("largest", curve.largest), ("with margin", curve.with_margin), ("best throughput", curve.best))
    head = ("batch per worker" if curve.workers > 1 else "batch", "samples/s", "peak MiB", "fits", "")
    rows = []
    for row in curve.rows:
        names = ", ".join(name for name, batch in marks if batch == row.batch)
        figures = number(row.samples_per_s), number(row.peak_mib)
        rows.append([str(row.batch), *figures, "yes" if row.fits else "no", names])
    return bare_table(head, rows, left=(4,))
