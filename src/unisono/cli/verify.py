"""``unisono verify``: does a script train the same weights on any number of workers?"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from unisono.cli.options import SCRIPT, Module, Starting, grouped, opt, read_workers
from unisono.errors import JobError
from unisono.launch.settings import Script, Size
from unisono.launch.tuning import Tuning

if TYPE_CHECKING:
    from unisono.launch.verify.verify import VerifyRequest

STEPS = 20
WORKERS = "1,2,3"
WHOLE = Size(1)
"""The job whose model is whole."""


app = typer.Typer()


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of a verification."""

    workers: Annotated[str | None, opt(metavar="N,N,…")] = None
    """Numbers of workers; all runs are compared with the first. By default 1,2,3, and 1 with --stages."""
    steps: Annotated[int, opt()] = STEPS
    """The number of steps to compare."""
    module: Module = False
    devices_per_worker: Annotated[str | None, opt(metavar="N,N,…")] = None
    """Numbers of devices of a worker; 1 by default."""
    fsdp: Annotated[bool, opt()] = False
    """For models in slices: the numbers of --workers are devices, in workers of any size."""
    stages: Annotated[str | None, opt(metavar="N,N,…")] = None
    """For models in stages: numbers of devices that carry them."""
    keep: Annotated[bool, opt()] = False
    """Keep the run folders, with logs and traces, and print where they are."""


@app.command(**SCRIPT)
@grouped
def verify(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The script to verify; a module's name with -m.", metavar="SCRIPT")],
    args: Annotated[
        list[str] | None, typer.Argument(help="The arguments of the script: everything after it.", metavar="ARGS")
    ] = None,
    *,
    own: VerifyOptions,
    told: Starting,
) -> None:
    """Train a script with several numbers of workers and compare all weights after every step, bit for bit.

    Options before the script are verify's, all that stands after it is the script's. If there are none before it,
    verify takes its own from behind the script, as far as "--":

        unisono verify --steps 50 train.py --steps 1000 --lr 0.1

        unisono verify train.py --lr 0.1 --workers 1,2,3,5 --steps 20

    With --devices-per-worker 1,4 the script runs with all of these numbers of workers on one device each, then on four.
    Models that do not fit one device are compared with the job whose model is whole:

        unisono verify train.py --workers 1,2,3,4 --fsdp    # slices: 1 device, 1 x 2, 1 x 3, 1 x 4, 2 x 2

        unisono verify train.py --stages 1,2,4              # stages, on so many devices

    Exit code 0 if all are identical, 1 if not, the script's own if it fails.
    """
    threads = told.arithmetic.values.get("threads")
    options = Options(
        own.workers,
        own.steps,
        told.shards,
        threads,
        own.keep,
        told.launch.tuning,
        own.devices_per_worker,
        own.fsdp,
        own.stages,
    )
    words: Sequence[str] = args or ()
    if not _given(context):
        options, words = options.taken_from(words)
    raise typer.Exit(start(options, Script(script, tuple(words), is_module=own.module)))


@dataclass(frozen=True, slots=True)
class Options:
    """Verify's own options."""

    workers: str | None
    steps: int
    shards: int | None
    threads: int | None
    keep: bool
    tuned: bool = True
    devices_per_worker: str | None = None
    fsdp: bool = False
    stages: str | None = None

    def taken_from(self, words: Sequence[str]) -> tuple[Options, list[str]]:
        """These options, unless others stand among words; and the words that are left.

        Raises:
            JobError: an option has no value, or none that can be read.
        """
        end = words.index("--") if "--" in words else len(words)
        found, rest = _Parser(self).parse_known_args(list(words[:end]))
        return Options(**vars(found)), rest + list(words[end + 1 :])

    def request(self, script: Script) -> VerifyRequest:
        """What is to be verified.

        Raises:
            JobError: a number is out of range, or the script cannot be run.
        """
        from unisono.launch.verify.verify import VerifyRequest

        tuning = Tuning.of_this_process(wanted=self.tuned)
        request = VerifyRequest(script, self.sizes(), self.steps, self.shards, self.threads, tuning)
        request.check()
        return request

    def sizes(self) -> tuple[Size, ...]:
        """The sizes of the runs; with slices or stages that of the whole model first.

        Raises:
            JobError: a number cannot be read, there is one size only, or options contradict each other.
        """
        devices = {"--devices-per-worker": self.devices_per_worker, "--stages": self.stages}
        said = [name for name, value in {**devices, "--fsdp": self.fsdp}.items() if value not in (None, False)]
        if len(said) > 1:
            raise JobError(f"{said[0]} and {said[1]} both say how many devices a worker has: leave one of them out")
        workers = self.workers or ("1" if self.stages else WORKERS)
        numbers = read_workers(workers)
        if self.fsdp:
            sizes = [size for number in numbers for size in _groups(number)]
        else:
            per_worker = read_workers(devices[said[0]] or "", said[0]) if said else (1,)
            sizes = [Size(number, each) for each in per_worker for number in numbers]
        if self.fsdp or self.stages:
            sizes = [WHOLE, *(size for size in sizes if size != WHOLE)]
        if len(sizes) < 2:
            named = f"--stages {self.stages}" if self.stages else f"--workers {workers}"
            raise JobError(f"{named}: name two numbers at least, such as {named.split()[0]} 1,3, to compare their runs")
        return tuple(sizes)


def _groups(devices: int) -> list[Size]:
    """All the ways to make workers of so many devices, of several each where that can be."""
    ways = [Size(devices // each, each) for each in range(devices, 1, -1) if devices % each == 0]
    return ways or [Size(devices)]


class _Parser(argparse.ArgumentParser):
    """Finds verify's options among the script's; what it does not know is the script's."""

    def __init__(self, defaults: Options) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--workers", default=defaults.workers)
        self.add_argument("--devices-per-worker", default=defaults.devices_per_worker)
        self.add_argument("--fsdp", action="store_true", default=defaults.fsdp)
        self.add_argument("--stages", default=defaults.stages)
        self.add_argument("--steps", type=int, default=defaults.steps)
        self.add_argument("--shards", type=int, default=defaults.shards)
        self.add_argument("--threads", type=int, default=defaults.threads)
        self.add_argument("--keep", action="store_true", default=defaults.keep)
        self.add_argument("--no-tuning", action="store_false", default=defaults.tuned, dest="tuned")

    def error(self, message: str) -> NoReturn:
        raise JobError(f"{message} (if it is meant for the script, put -- before it)")


def _given(context: typer.Context) -> bool:
    """Whether an option of verify stands before the script."""
    options = [each.name for each in context.command.params if each.param_type_name == "option"]
    sources = [context.get_parameter_source(name) for name in options if name and name != "module"]
    return any(source is not None and source.name == "COMMANDLINE" for source in sources)


def start(options: Options, script: Script) -> int:
    """Verify a script and print what came of it.

    Returns:
        the exit code.

    Raises:
        JobError: a setting cannot work, or the script does nothing that could be compared.
        LaunchError: a worker could not be started.
    """
    from unisono.cli.verdict import Printer
    from unisono.launch.verify.verify import verify

    request = options.request(script)
    printer = Printer(request)
    printer.begin()
    with _folder(keep=options.keep) as folder:
        verification = verify(request, folder, printer.watch)
        printer.show(verification, kept=options.keep)
    return verification.exit_code


@contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    """A folder for runs and traces, removed in the end unless it is to be kept."""
    folder = Path(tempfile.mkdtemp(prefix="unisono-verify-"))
    try:
        yield folder
    finally:
        if keep:
            typer.echo(f"runs, logs and traces are kept in {folder}")
        else:
            shutil.rmtree(folder)
