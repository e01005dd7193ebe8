"""``unisono verify``: does a script train the same weights on any number of workers?"""

from __future__ import annotations

import argparse
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.cli.display import HelpfulCommand, show_table
from unisono.cli.options import SCRIPT, Module, ScriptArguments, Starting, grouped, opt, read_workers
from unisono.errors import JobError
from unisono.launch.comparison import Finding, Stage
from unisono.launch.hints import Hint
from unisono.launch.outcome import last_lines
from unisono.launch.settings import Script, Size
from unisono.launch.tuning import Tuning
from unisono.launch.verify_runs import (
    TracedRun,
    VerifyRequest,
    VerifyResult,
    equal_until_then,
    repeated_text,
    weights_text,
    where,
)
from unisono.launch.verify_runs import verify as verified
from unisono.settings.table import Settings

STEPS = 20
WORKERS = "1,2,3"
WHOLE = Size(1)
"""The job whose model is whole."""


NUMBERS = ("steps", "shards", "arithmetic__threads")
"""The options whose values are numbers."""


class _Parser(argparse.ArgumentParser):
    """Finds a command's options among the words of a script. Unknown words are the script's."""

    def __init__(self, options: Sequence[Any]) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        for option in options:
            if option.is_flag:  # of --tuning and --no-tuning, the one that differs from the default
                name = (option.secondary_opts or option.opts)[0]
                self.add_argument(name, dest=option.name, action="store_const", const=not option.secondary_opts)
            else:
                self.add_argument(*option.opts, dest=option.name, type=int if option.name in NUMBERS else str)

    def error(self, message: str) -> NoReturn:
        raise JobError(f"{message} (if it is for the script, put -- before it)")


class VerifyCommand(HelpfulCommand):
    """A command that takes its options from behind the script, as far as ``--``, if there are none before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before the script, else what stands behind it.

        Raises:
            JobError: an option behind it has no value, or none that can be read.
        """
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # a shell asks what may come next: what stands there is not whole yet
            return rest
        options = [option for option in self.params if option.param_type_name == "option" and option.name != "module"]
        sources = [ctx.get_parameter_source(option.name) for option in options]
        if not any(source is not None and source.name == "COMMANDLINE" for source in sources):
            words = list(ctx.params["args"] or ())
            end = words.index("--") if "--" in words else len(words)
            own, others = _Parser(options).parse_known_args(words[:end])
            ctx.params |= {**vars(own), "args": others + words[end + 1 :]}
        return rest


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

    def request(self, script: Script, settings: Settings) -> VerifyRequest:
        """The request to verify a script with these options.

        Raises:
            JobError: a number is out of range, or the script cannot be run.
        """
        tuning, threads = (
            Tuning.of_this_process(wanted=settings.launch.tuning),
            settings.arithmetic.values.get("threads"),
        )
        request = VerifyRequest(script, self.sizes(), self.steps, settings.shards, threads, tuning)
        request.check()
        return request

    def sizes(self) -> tuple[Size, ...]:
        """The sizes of the runs; with slices or stages that of the whole model first.

        Raises:
            JobError: a number cannot be read, there is one size only, or options contradict each other.
        """
        numbers_of = {"--devices-per-worker": self.devices_per_worker, "--stages": self.stages}
        used = [name for name, value in {**numbers_of, "--fsdp": self.fsdp}.items() if value not in (None, False)]
        if len(used) > 1:
            raise JobError(f"{used[0]} and {used[1]} both set the number of devices of a worker: leave one of them out")
        workers = self.workers or ("1" if self.stages else WORKERS)
        numbers = read_workers(workers)
        if self.fsdp:
            sizes = [size for number in numbers for size in _groups(number)]
        else:
            per_worker = read_workers(numbers_of[used[0]] or "", used[0]) if used else (1,)
            sizes = [Size(number, devices) for devices in per_worker for number in numbers]
        if self.fsdp or self.stages:
            sizes = [WHOLE, *(size for size in sizes if size != WHOLE)]
        if len(sizes) < 2:
            named = f"--stages {self.stages}" if self.stages else f"--workers {workers}"
            raise JobError(f"{named}: name two numbers at least, such as {named.split()[0]} 1,3, to compare their runs")
        return tuple(sizes)


@app.command(**{**SCRIPT, "cls": VerifyCommand})
@grouped
def verify(
    script: Annotated[str, typer.Argument(help="The script to verify; a module's name with -m.", metavar="SCRIPT")],
    args: ScriptArguments = None,
    *,
    own: VerifyOptions,
    settings: Starting,
) -> None:
    """Compare a script's weights on several numbers of workers.

    The script trains with each of them, and all weights are compared after every step, bit for bit.

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
    raise typer.Exit(start(own, settings, Script(script, tuple(args or ()), is_module=own.module)))


def _groups(devices: int) -> list[Size]:
    """All ways to divide devices among workers of several devices each; one device each if there is no such way."""
    ways = [
        Size(devices // per_worker, per_worker) for per_worker in range(devices, 1, -1) if devices % per_worker == 0
    ]
    return ways or [Size(devices)]


def start(options: VerifyOptions, settings: Settings, script: Script) -> int:
    """Verify a script and print the result.

    Returns:
        the exit code.

    Raises:
        JobError: a setting cannot work, or the script gives nothing to compare.
        LaunchError: a worker could not be started.
    """
    request = options.request(script, settings)
    printer = Printer(request)
    printer.begin()
    with _folder(keep=options.keep) as folder:
        verification = verified(request, folder, printer.watch)
        printer.show(verification, kept=options.keep)
    return verification.exit_code


@contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="unisono-verify-"))
    try:
        yield folder
    finally:
        if keep:
            typer.echo(f"runs, logs and traces are kept in {folder}")
        else:
            shutil.rmtree(folder)


# The output: the progress, a table of the runs, and a verdict with its reasons.

MOST_HINTS = 5
LOG_LINES = 40
DIGITS = 16
"""The number of digits of the weights' sha256 in the table."""


class Printer:
    """Prints one verification: the progress to stderr, the result to stdout."""

    def __init__(self, request: VerifyRequest) -> None:
        self._request = request
        self._out = Console(highlight=False, emoji=False)
        self._err = Console(stderr=True, highlight=False, emoji=False)

    def begin(self) -> None:
        """Print which runs will be compared."""
        steps = f"{self._request.steps} step{'s' if self._request.steps > 1 else ''}"
        title = Text.assemble(("unisono verify  ", "bold"), shlex.join(self._request.script.argv))
        self._print(title.append(f"  ({steps}, {_sizes(self._request.sizes)})", "dim"))

    @contextmanager
    def watch(self, label: str, trace: Path) -> Iterator[None]:
        """Show that a run is under way: on a terminal with its number of steps, elsewhere in a line."""
        if self._err.is_terminal:
            with self._err.status(_Steps(label, trace / "rank-0.jsonl")):
                yield
        else:
            self._err.print(Text(label), soft_wrap=True)
            yield

    def show(self, verification: VerifyResult, *, kept: bool) -> None:
        """Print the table, the verdict, and its reasons."""
        self._print(Text())
        show_table(_table(verification), self._out)
        self._print(Text())
        failed, case = verification.failed, verification.case
        if case is not None:
            self._print(Text(_headline(case.finding), "bold red"))
            self._out.print(_reasons(verification))
        if failed is not None:
            self._show_failure(verification, failed, kept=kept)
        elif case is None:
            self._print(Text(_identical(self._request, verification), "bold green"))
            for words in verification.unnamed:
                self._print(Text(f"But this may not last: {words}", "bold red"))
            if not verification.runs[0].trace.has_trained:
                self._print(Text(_NOTHING_TRAINED, "bold yellow"))
            for note in _notes(verification):
                self._print(Text(note, "dim"))

    def _show_failure(self, verification: VerifyResult, run: TracedRun, *, kept: bool) -> None:
        outcome, cause = run.trial.outcome, run.trial.outcome.cause
        words = outcome.summary()
        if cause is not None and outcome.interrupted is None and verification.case is None:
            for line in last_lines(run.trial.log, LOG_LINES):
                self._print(Text.assemble((f"[rank {cause.rank}] ", "dim"), line))
            words = f"see the last lines of rank {cause.rank} above" if cause.failure is not None else words
        text = f"The run with {run.trace.size} failed with exit code {outcome.exit_code}: {words}"
        self._print(Text(text, "bold red"))
        if not kept:
            self._print(Text("The logs of all workers can be kept with --keep.", "dim"))

    def _print(self, text: Text) -> None:
        # Without rich's own wrapping: files and pipes get whole lines, and terminals wrap them.
        self._out.print(text, soft_wrap=True)


_NOTHING_TRAINED = (
    "But nothing was trained: after the last step all parameters are what they were before the first. Does the "
    "optimizer hold those of this model, is its learning rate above 0, and does the loss depend on them?"
)


class _Steps:
    """The progress of a run, which is read from its trace whenever it is drawn."""

    def __init__(self, label: str, trace: Path) -> None:
        self._label, self._trace = label, trace
        self._read, self._moments = 0, 0

    def __rich__(self) -> Text:
        if self._trace.exists():
            with self._trace.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            self._moments += whole.count(b'{"kind": "weights"')
        steps = f", step {self._moments - 1}" if self._moments > 1 else ""
        return Text(f"{self._label}{steps}")


def _table(verification: VerifyResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("workers", "steps"):
        table.add_column(name, justify="right")
    table.add_column("last weights")
    table.add_column(f"compared with {verification.runs[0].trace.size}")
    for number, (run, finding) in enumerate(zip(verification.runs, verification.findings, strict=True)):
        verdict = _verdict(run, finding, is_first=number == 0)
        digest = run.trace.sha256[:DIGITS] or "none"
        table.add_row(_number(run.trace.size), str(run.trace.steps), digest, verdict)
    return table


def _verdict(run: TracedRun, finding: Finding | None, *, is_first: bool) -> Text:
    failed = f"failed, exit code {run.trial.outcome.exit_code}" if run.trial.failed else ""
    if finding is not None:
        return Text(_brief(finding) + (f"; {failed}" if failed else ""), "red")
    if failed:
        return Text(failed, "red")
    return Text("(the first)", "dim") if is_first else Text("identical", "green")


def _brief(finding: Finding) -> str:
    counts = finding.parting.counts
    match counts.stage:
        case Stage.START:
            words = "differ from the start"
        case Stage.LENGTH:
            words = "differ in length"
        case Stage.LOSSES if finding.parting.weights is None:
            words = f"other losses from step {counts.step} on"
        case _:
            words = f"differ from step {counts.step} on"
    return f"its ranks {words}" if finding.against is None else words.replace("differ ", "differs ")


def _headline(finding: Finding) -> str:
    counts, weights = finding.parting.counts, finding.parting.weights
    who = str(finding.size)
    if finding.against is None:
        pair = f"with {who}, rank {finding.rank} parts from rank 0"
    elif finding.against == finding.size:
        pair = f"{who} part from {who}" if finding.size.workers > 1 else f"two runs with {who} part"
    else:
        pair = f"{who} part{'s' if finding.size.workers == 1 else ''} from {finding.against}"
    if counts.stage is Stage.START:
        return f"Not identical: {pair} before the first step."
    if counts.stage is Stage.LENGTH:
        return f"Not identical: {pair} in the number of steps."
    if counts.stage is Stage.LOSSES and weights is None:
        return f"Not identical: {pair} in the loss of step {counts.step}, although the weights stay the same."
    return f"Not identical: {pair} in step {counts.step} (steps count from 0)."


def _reasons(verification: VerifyResult) -> Table:
    case, cause, unnamed = verification.case, verification.cause, verification.unnamed
    assert case is not None, "there are no reasons without a finding"
    assert cause is not None, "every finding is explained"
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    rows = [
        ("where", where(case.finding)),
        ("weights", weights_text(case.finding)),
        ("still equal", equal_until_then(case.finding)),
        ("repeated", repeated_text(case)),
        *([("likely cause", words) for words in unnamed] or [("likely cause", cause.likely), ("to do", cause.todo)]),
    ]
    for label, words in rows:
        if words:
            grid.add_row(f"  {label}", Text(words))
    for label, place in _places(verification.hints):
        grid.add_row(f"  {label}", place)
    return grid


def _places(hints: Sequence[Hint]) -> Iterator[tuple[str, Text]]:
    shown = hints[:MOST_HINTS]
    label = "look at"
    for topic, places in groupby(shown, key=lambda hint: hint.topic):
        yield label, Text(f"what {topic} (a hint, no proof):" if label else f"what {topic}:")
        label = ""
        for place in places:
            where = f"  {place.path}:{place.line}  "
            yield "", Text.assemble(where, (place.code, "cyan"), no_wrap=True, overflow="ellipsis")
    if len(hints) > len(shown):
        yield "", Text(f"and {len(hints) - len(shown)} more such places")


def _identical(request: VerifyRequest, verification: VerifyResult) -> str:
    trace = verification.runs[0].trace
    steps = "after the only step" if trace.steps == 1 else f"after each of {trace.steps} steps"
    fewer = "" if trace.steps == request.steps else " (the script takes no more)"
    sizes = _sizes(request.sizes)
    return f"Identical: all {trace.tensors} parameters and buffers, bit for bit, with {sizes}, {steps}{fewer}."


def _notes(verification: VerifyResult) -> list[str]:
    notes = []
    job = verification.runs[0].trace.job
    if job.get("reduction") == "native":
        notes.append('The job uses reduction="native", which does not promise this: it may differ next time.')
    if max(run.trace.size.processes for run in verification.runs) < 3 <= job.get("shards", 3):
        notes.append("Two workers hide mistakes, since a + b = b + a: --workers 1,3 shows more.")
    return notes


def _number(size: Size) -> str:
    return str(size.workers) if size.devices == 1 else f"{size.workers} × {size.devices}"


def _sizes(sizes: Sequence[Size]) -> str:
    *first, last = map(_number, sizes)
    devices = "" if all(size.devices == 1 for size in sizes) else " (× devices)"
    return f"{', '.join(first)} and {last} workers{devices}" if first else f"{last} workers{devices}"
