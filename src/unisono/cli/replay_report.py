"""What ``unisono replay`` shows. Loaded when it is called: no other command reads records, or needs policies."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from unisono.adapt.named import policies_named
from unisono.cli.tables import show_table
from unisono.cli.timeline import comparison_lines, comparison_table, timeline_lines, timeline_table
from unisono.jsonl import to_json
from unisono.study.replay.record import Record
from unisono.study.replay.timeline import UNTOLD, Pair, compared, decisions_that_hold, timeline

if TYPE_CHECKING:
    from unisono.study.replay.replay import Replay

OPEN_LOOP = (
    "The replay sees what the run measured, which does not react to what it decides; only batch size and learning rate "
    "follow its decisions."
)
NO_DECISIONS = (
    "No policy decided anything in this run. Give it one with unisono run --policy or unisono.init(policies=…); "
    "unisono replay --policy NAME shows what one would have done."
)


def report(run: Path, policies: Sequence[str], plot: Path | None, *, everything: bool, as_json: bool) -> None:
    """Show it.

    Args:
        run: the run's folder.
        policies: names of those that are asked what they would have done; if there are none, what was decided is shown.
        plot: where to draw it too.
        everything: a row for each decision and each event.
        as_json: lines for programs.

    Raises:
        JobError: the folder cannot be read, there is no such policy, or the picture cannot be drawn.
    """
    if plot is not None:
        from unisono.study.replay.plot import draw, require_drawable

        require_drawable(plot)
    record = Record.read(run)
    for words in record.damaged:
        typer.echo(f"unisono: {words}", err=True)
    replayed = _replayed(record, policies) if policies else None
    out = Console(highlight=False, emoji=False)
    if replayed is None:
        _show_timeline(record, out, everything=everything, as_json=as_json)
    else:
        _show_comparison(record, replayed, out, everything=everything, as_json=as_json)
    if plot is not None:
        draw(record, plot, replayed)
        typer.echo(f"written: {plot}", err=as_json)


def _replayed(record: Record, names: Sequence[str]) -> Replay:
    from unisono.study.replay.replay import replay as replayed  # it loads torch

    sys.path.insert(0, os.getcwd())  # noqa: PTH109 (a string); a module of the user's lies where he stands
    return replayed(record, policies_named(names, record.job.batch_size))


def _show_timeline(record: Record, out: Console, *, everything: bool, as_json: bool) -> None:
    told = [one for one in timeline(record.journal) if everything or one.event not in UNTOLD]
    if as_json:
        for line in timeline_lines(told):
            typer.echo(to_json(line), nl=False)
        return
    show_table(timeline_table(told, unfolded=everything), out)
    if not any(one.event == "decided" for one in told):
        out.print(Text(NO_DECISIONS), soft_wrap=True)


def _show_comparison(record: Record, replayed: Replay, out: Console, *, everything: bool, as_json: bool) -> None:
    pairs = compared(decisions_that_hold(record.journal), replayed.decisions)
    if as_json:
        for line in comparison_lines(pairs):
            typer.echo(to_json(line), nl=False)
    elif pairs:
        show_table(comparison_table(pairs, unfolded=everything), out)
    for words in _notes(pairs, replayed):
        typer.echo(words, err=as_json)


def _notes(pairs: Sequence[Pair], replayed: Replay) -> Iterator[str]:
    counts = Counter(pair.likeness for pair in pairs)
    listed = ", ".join(f"{count} {likeness}" for likeness, count in sorted(counts.items()))
    yield f"Decisions: {listed or 'none, neither in the run nor in the replay'}."
    yield OPEN_LOOP
    if replayed.stopped is not None:
        yield f"The replay ends the loop after step {replayed.stopped}; what the run did later it has not seen."
    if replayed.unwatched:
        yield f"Gradients were not measured in {replayed.unwatched} of the steps; there the replay sees older figures."
    if replayed.untimed:
        yield f"The workers' times were not written down in {replayed.untimed} of the steps; there it sees older ones."
    if replayed.gaps:
        some = ", ".join(map(str, replayed.gaps[:10])) + (" …" if len(replayed.gaps) > 10 else "")
        yield f"Steps that are not recorded, and after which the replay was not asked: {some}"
