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

from unisono.cli.options import Module, ScriptName, Starting, grouped, opt
from unisono.cli.tables import bare_table, show_table
from unisono.errors import JobError
from unisono.host.cgroup import read_limits
from unisono.host.memory import MIB, room_mib
from unisono.launch.local import Launcher
from unisono.launch.settings import LaunchSettings, Script
from unisono_lab.commands.study import STUDIES, ScriptArgs, StudyCommand, say_ended

if TYPE_CHECKING:
    from unisono_lab.analysis.batch_curve import Tried
    from unisono_lab.measure.batch_search import BatchRunner, BatchSearch
if TYPE_CHECKING:
    from unisono_lab.analysis.batch_curve import BatchCurve, Tried

ROOM_SHARE = 0.9
"""Of the memory that is free now, what trials may take where no limit is given: the rest is for everybody else."""

LEAST_STEPS = 3
"""The optimizer's state is there from the second step on."""


app = typer.Typer()


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of this command."""

    workers: Annotated[int, opt("-n", "--workers")] = 1
    """The number of workers; each gets the batch that is tried."""
    memory_limit: Annotated[str | None, opt(metavar="SIZE")] = None
    """The host memory that each worker may use, such as 2GiB; by default its share of the free memory."""
    first: Annotated[int, opt("--from")] = 16
    """The first batch per worker to try."""
    most: Annotated[int | None, opt()] = None
    """The largest batch per worker to try."""
    steps: Annotated[int, opt()] = 20
    """The number of steps of each trial."""
    margin: Annotated[float, opt()] = 0.1
    """The safety margin: recommend a batch smaller than the largest by this share."""
    json: Annotated[Path | None, opt(metavar="FILE")] = None
    """The file for the figures; by default one that unisono study finds."""
    module: Module = False


@app.command(cls=StudyCommand)
@grouped
def batch_size(
    script: ScriptName,
    args: ScriptArgs = None,
    *,
    own: SearchOptions,
    options: Starting,
) -> None:
    """Find the largest batch per worker that fits, and the one with the best throughput.

        unisono batch-size train.py -n 2 --memory-limit 2GiB -- --lr 0.1

    The script runs unchanged, with other batches, in fresh processes for each. Exit code 0 if a batch fits, 1 if none
    does or the script fails.
    """
    from unisono_lab.analysis.batch_curve import FAILED_NAME
    from unisono_lab.measure.batch_search import BatchRunner, BatchSearch
    from unisono_lab.measure.engines import TRIAL_GRACE_S

    search = BatchSearch(own.workers, own.first, own.most, own.margin)
    search.check()
    if own.steps < LEAST_STEPS:
        raise JobError(f"--steps {own.steps}: a trial needs at least {LEAST_STEPS} to show what memory it takes")
    limit = (
        ROOM_SHARE * room_mib(read_limits()) / own.workers if own.memory_limit is None else read_mib(own.memory_limit)
    )
    launched = Script(script, tuple(args or ()), is_module=own.module)
    settings = LaunchSettings.tuned(launched, options, workers=own.workers, memory_limit_mib=limit)
    settings = settings.with_options({"launch.grace_s": TRIAL_GRACE_S})
    settings.check()
    path = file_of(own.json, settings.script.stem)
    raise typer.Exit(start(search, BatchRunner(settings, own.steps, path.parent / FAILED_NAME), path))


def read_mib(text: str) -> float:
    """``2GiB``, ``500 MB`` or a number of bytes, in MiB.

    Raises:
        JobError: it is no size.
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
    """Search, print, and keep the figures.

    Args:
        search: the search to make.
        runner: the runner of trials.
        path: the file for the figures.

    Returns:
        the exit code.

    Raises:
        JobError: the file cannot be written, or the script takes no steps.
        LaunchError: the script failed, and not for its memory.
    """
    from unisono_lab.measure.batch_search import searched

    settings = runner.settings
    err = Console(stderr=True, highlight=False, emoji=False)

    def tell(tried: Tried) -> None:
        err.print(Text(line(tried)), soft_wrap=True)

    try:
        with tempfile.TemporaryDirectory(prefix="unisono-batch-size-") as folder, Launcher(share=True) as launcher:
            command = shlex.join(["unisono", *sys.argv[1:]])
            attempt = partial(runner.attempt, launcher=launcher, folder=Path(folder))
            curve = searched(search, attempt, tell, settings.memory_limit_mib, command)
    except KeyboardInterrupt as interrupted:
        return say_ended(interrupted, "nothing is kept", err)
    report(curve, path)
    return 1 if curve.largest is None else 0


# The output of ``unisono batch-size``, and the file that it writes.

ENDS = {
    "memory": "more do not fit into memory",
    "data": "the data set has no more for a step",
    "most": "more were not to be tried",
}


def file_of(wanted: Path | None, stem: str) -> Path:
    """Where the figures go: by default into the folder of the script's study.

    Raises:
        JobError: it cannot be written.
    """
    from unisono_lab.analysis.batch_curve import NAME

    path = wanted or STUDIES / stem / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()  # nobody waits for an answer that cannot be kept
        if path.stat().st_size == 0:
            path.unlink()
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error}; name another file with --json") from error
    return path


def line(tried: Tried) -> str:
    """What came of a trial, in a line."""
    from unisono_lab.analysis.estimate import number  # loads numpy, which starts a thread: no fork server may have one

    if not tried.fits:
        return f"batch {tried.batch}: does not fit: {tried.words}"
    memory = "" if tried.peak_mib is None else f", {number(tried.peak_mib)} MiB"
    speed = "" if tried.samples_per_s is None else f", {number(tried.samples_per_s)} samples/s"
    return f"batch {tried.batch}: fits{memory}{speed}"


def report(curve: BatchCurve, path: Path) -> None:
    """Print the answer and what was tried, and write both into a file.

    Args:
        curve: the search's results.
        path: the file to write.

    Raises:
        JobError: it cannot be written.
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
    from unisono_lab.analysis.estimate import counted, number, percent

    limit = "" if curve.memory_limit_mib is None else f" (limit: {curve.memory_limit_mib:.0f} MiB of the host's memory)"
    if curve.largest is None:
        smallest = min(curve.rows, key=lambda row: row.batch)
        return [f"no batch fits, not even {_batch(smallest.batch, curve.workers)}{limit}: {smallest.words}"]
    ends = ENDS[curve.bound] + (limit if curve.bound == "memory" else "")
    said = [f"largest batch that fits: {_batch(curve.largest, curve.workers)}; {ends}"]
    if curve.with_margin is not None and curve.with_margin != curve.largest:
        said.append(f"with a margin of {percent(curve.margin)}: {_batch(curve.with_margin, curve.workers)}")
    if curve.best is None:
        return [*said, "no trial was long enough to be timed: the script takes too few steps"]
    rate = next(row.samples_per_s for row in curve.rows if row.batch == curve.best)
    return [
        *said,
        f"best throughput: {_batch(curve.best, curve.workers)}, {number(rate)} samples/s",
        f"so take unisono.init(batch_size={curve.best * curve.workers}) with {counted(curve.workers, 'worker')}",
    ]


def _batch(batch: int, workers: int) -> str:
    return f"{batch}" if workers == 1 else f"{batch} per worker, {batch * workers} in all"


def _table(curve: BatchCurve) -> Table:
    from unisono_lab.analysis.estimate import number

    marks = (("largest", curve.largest), ("with margin", curve.with_margin), ("best throughput", curve.best))
    head = ("batch per worker" if curve.workers > 1 else "batch", "samples/s", "peak MiB", "fits", "")
    rows = []
    for one in curve.rows:
        names = [name for name, batch in marks if batch == one.batch]
        fields = [str(one.batch), number(one.samples_per_s), number(one.peak_mib), "yes" if one.fits else "no"]
        rows.append([*fields, ", ".join(names)])
    return bare_table(head, rows, left=(4,))
