"""``unisono verify``: does a script train the same weights on any number of workers?"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from unisono.cli.options import Module, Shards, Threads, Tuned, read_workers
from unisono.errors import JobError
from unisono.launch.settings import Script
from unisono.launch.tuning import Tuning

if TYPE_CHECKING:
    from unisono.launch.verify.verify import VerifyRequest

STEPS = 20
WORKERS = "1,2,3"
DEVICES = "1"


def verify(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The script to verify; a module's name with -m.", metavar="SCRIPT")],
    args: Annotated[
        list[str] | None, typer.Argument(help="The arguments of the script: everything after it.", metavar="ARGS")
    ] = None,
    workers: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of workers to run with; all runs are compared with the first.")
    ] = WORKERS,
    steps: Annotated[int, typer.Option(help="The number of steps to compare.")] = STEPS,
    module: Module = False,
    shards: Shards = None,
    threads: Threads = None,
    devices_per_worker: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of devices of a worker, for models in slices or stages.")
    ] = DEVICES,
    tuned: Tuned = True,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the run folders, with logs and traces, and print where they are.")
    ] = False,
) -> None:
    """Train a script with several numbers of workers and compare all weights after every step, bit for bit.

    Options before the script are verify's, all that stands after it is the script's. If there are none before it,
    verify takes its own from behind the script, as far as "--":

        unisono verify --steps 50 train.py --steps 1000 --lr 0.1

        unisono verify train.py --lr 0.1 --workers 1,2,3,5 --steps 20

    With --devices-per-worker 1,4 the script runs with all of these numbers of workers on one device each, then on four.

    Exit code 0 if all are identical, 1 if not, the script's own if it fails.
    """
    options = Options(workers, steps, shards, threads, keep, tuned, devices_per_worker)
    words: Sequence[str] = args or ()
    if not _given(context):
        options, words = options.taken_from(words)
    raise typer.Exit(start(options, Script(script, tuple(words), is_module=module)))


@dataclass(frozen=True, slots=True)
class Options:
    """Verify's own options."""

    workers: str
    steps: int
    shards: int | None
    threads: int | None
    keep: bool
    tuned: bool = True
    devices_per_worker: str = DEVICES

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
        workers, devices = read_workers(self.workers), read_workers(self.devices_per_worker, "--devices-per-worker")
        request = VerifyRequest(script, workers, self.steps, self.shards, self.threads, tuning, devices)
        request.check()
        return request


class _Parser(argparse.ArgumentParser):
    """Finds verify's options among the script's; what it does not know is the script's."""

    def __init__(self, defaults: Options) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--workers", default=defaults.workers)
        self.add_argument("--devices-per-worker", default=defaults.devices_per_worker)
        self.add_argument("--steps", type=int, default=defaults.steps)
        self.add_argument("--shards", type=int, default=defaults.shards)
        self.add_argument("--threads", type=int, default=defaults.threads)
        self.add_argument("--keep", action="store_true", default=defaults.keep)
        self.add_argument("--no-tuning", action="store_false", default=defaults.tuned, dest="tuned")

    def error(self, message: str) -> NoReturn:
        raise JobError(f"{message} (if it is meant for the script, put -- before it)")


def _given(context: typer.Context) -> bool:
    """Whether an option of verify stands before the script."""
    sources = [context.get_parameter_source(each.name) for each in fields(Options)]
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
