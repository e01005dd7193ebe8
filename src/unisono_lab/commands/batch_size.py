"""``unisono batch-size``: the largest batch that fits into memory, and the fastest."""

from __future__ import annotations

import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from unisono.cli.options import ScriptName, WorkerOptions, grouped
from unisono.errors import FIRST_SIGNAL, JobError
from unisono.host.cgroup import read_limits
from unisono.host.memory import MIB, room_mib
from unisono.launch.local import Launcher
from unisono_lab.commands.study_options import ScriptArgs, StudyCommand

if TYPE_CHECKING:
    from unisono_lab.analysis.batch_curve import Tried
    from unisono_lab.measure.batch_search import BatchSearch
    from unisono_lab.measure.batch_searching import BatchRunner

ROOM_SHARE = 0.9
"""Of the memory that is free now, what trials may take where no limit is given: the rest is for everybody else."""

LEAST_STEPS = 3
"""The optimizer's state is there from the second step on."""

Workers = Annotated[
    int, typer.Option("-n", "--workers", help="The number of workers; each gets the batch that is tried.")
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The host memory that each worker may use, such as 2GiB; by default its share of the free memory.",
        show_default=False,
    ),
]
First = Annotated[int, typer.Option("--from", help="The first batch per worker to try.")]
Most = Annotated[int | None, typer.Option(help="The largest batch per worker to try.", show_default=False)]
Steps = Annotated[int, typer.Option(help="The number of steps of each trial.")]
Margin = Annotated[
    float, typer.Option(help="The safety margin: recommend a batch smaller than the largest by this share.")
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="The file for the figures; by default one that unisono study finds.",
        show_default=False,
    ),
]


app = typer.Typer()


@app.command(cls=StudyCommand)
@grouped
def batch_size(
    script: ScriptName,
    args: ScriptArgs = None,
    workers: Workers = 1,
    memory_limit: MemoryLimit = None,
    first: First = 16,
    most: Most = None,
    steps: Steps = 20,
    margin: Margin = 0.1,
    json: Json = None,
    *,
    job: WorkerOptions,
) -> None:
    """Find the largest batch per worker that fits, and the one with the best throughput.

        unisono batch-size train.py -n 2 --memory-limit 2GiB -- --lr 0.1

    The script runs unchanged, with other batches, in fresh processes for each. Exit code 0 if a batch fits, 1 if none
    does or the script fails.
    """
    from unisono_lab.analysis.batch_curve import FAILED_NAME
    from unisono_lab.commands.batch_size_report import file_of
    from unisono_lab.measure.batch_search import BatchSearch
    from unisono_lab.measure.batch_searching import BatchRunner
    from unisono_lab.measure.cell_runner import TRIAL_GRACE_S

    search = BatchSearch(workers, first, most, margin)
    search.check()
    if steps < LEAST_STEPS:
        raise JobError(f"--steps {steps}: a trial needs at least {LEAST_STEPS} to show what memory it takes")
    limit = ROOM_SHARE * room_mib(read_limits()) / workers if memory_limit is None else read_mib(memory_limit)
    settings = job.settings(script, args, workers=workers, grace_s=TRIAL_GRACE_S, memory_limit_mib=limit)
    settings.check()
    path = file_of(json, settings.script.stem)
    raise typer.Exit(start(search, BatchRunner(settings, steps, path.parent / FAILED_NAME), path))


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
    from unisono_lab.commands.batch_size_report import line, report
    from unisono_lab.measure.batch_searching import searched
    from unisono_lab.measure.measuring import Interrupted

    settings = runner.settings
    err = Console(stderr=True, highlight=False, emoji=False)

    def tell(tried: Tried) -> None:
        err.print(Text(line(tried)), soft_wrap=True)

    try:
        with tempfile.TemporaryDirectory(prefix="unisono-batch-size-") as folder, Launcher(share=True) as launcher:
            whole = searched(search, lambda batch: runner.attempt(batch, launcher, Path(folder)), tell)
    except (Interrupted, KeyboardInterrupt) as interrupted:
        number = interrupted.signal if isinstance(interrupted, Interrupted) else signal.SIGINT
        err.print(Text(f"unisono: ended by {signal.Signals(number).name}: nothing is kept"), soft_wrap=True)
        return FIRST_SIGNAL + number
    command = shlex.join(["unisono", *sys.argv[1:]])
    report(whole, whole.curve(search, settings.memory_limit_mib, command), path)
    return 1 if whole.found.largest is None else 0
