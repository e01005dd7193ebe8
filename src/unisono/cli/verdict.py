"""The output of ``unisono verify``: its progress, a table of the runs, and a verdict with its reasons."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.cli.tables import show_table
from unisono.launch.ending.result import last_lines
from unisono.launch.settings import Size
from unisono.launch.verify.cause import equal_until_then, repeated_text, weights_text, where
from unisono.launch.verify.comparison import Finding, Stage
from unisono.launch.verify.hints import Hint
from unisono.launch.verify.verify import TracedRun, VerifyRequest, VerifyResult

MOST_HINTS = 5
LOG_LINES = 40
DIGITS = 16
"""Of the weights' sha256 in the table."""


class Printer:
    """Prints one verification: progress to stderr, what came of it to stdout."""

    def __init__(self, request: VerifyRequest) -> None:
        self._request = request
        self._out = Console(highlight=False, emoji=False)
        self._err = Console(stderr=True, highlight=False, emoji=False)

    def begin(self) -> None:
        """Say what is going to be compared."""
        steps = f"{self._request.steps} step{'s' if self._request.steps > 1 else ''}"
        title = Text.assemble(("unisono verify  ", "bold"), shlex.join(self._request.script.argv))
        self._print(title.append(f"  ({steps}, {_sizes(self._request.sizes)})", "dim"))

    @contextmanager
    def watch(self, label: str, trace: Path) -> Iterator[None]:
        """Show that a run is under way: with its steps on a terminal, else in a line."""
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
            if not verification.runs[0].trace.has_trained:
                self._print(Text(_NOTHING_TRAINED, "bold yellow"))
            for note in _notes(verification):
                self._print(Text(note, "dim"))

    def _show_failure(self, verification: VerifyResult, run: TracedRun, *, kept: bool) -> None:
        outcome, cause = run.outcome, run.outcome.cause
        words = outcome.summary()
        if cause is not None and outcome.interrupted is None and verification.case is None:
            for line in last_lines(run.folder.log_of(cause.rank), LOG_LINES):
                self._print(Text.assemble((f"[rank {cause.rank}] ", "dim"), line))
            words = f"see the last lines of rank {cause.rank} above" if cause.failure is not None else words
        text = f"The run with {run.trace.size} failed with exit code {outcome.exit_code}: {words}"
        self._print(Text(text, "bold red"))
        if not kept:
            self._print(Text("The logs of all workers can be kept with --keep.", "dim"))

    def _print(self, text: Text) -> None:
        # A file or a pipe gets whole lines; a terminal wraps them by itself.
        self._out.print(text, soft_wrap=True)


_NOTHING_TRAINED = (
    "But nothing was trained: after the last step all parameters are what they were before the first. Does the "
    "optimizer hold those of this model, is its learning rate above 0, and does the loss depend on them?"
)


class _Steps:
    """The progress of a run, read from its trace whenever it is drawn."""

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
    failed = f"failed, exit code {run.outcome.exit_code}" if run.failed else ""
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
    case, cause = verification.case, verification.cause
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
        ("likely cause", cause.likely),
        ("to do", cause.todo),
    ]
    for label, words in rows:
        if words:
            grid.add_row(f"  {label}", Text(words))
    for label, place in _places(verification.hints):
        grid.add_row(f"  {label}", place)
    return grid


def _places(hints: Sequence[Hint]) -> Iterator[tuple[str, Text]]:
    """The first of the hints, under what they have to do with."""
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
