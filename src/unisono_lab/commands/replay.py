"""``unisono replay``: what was decided in a run, when and why."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.adapt.named import policies_named
from unisono.adapt.view import Decision
from unisono.cli.completion import run_folders
from unisono.cli.options import grouped, opt
from unisono.cli.tables import show_table
from unisono.jsonl import to_json
from unisono_lab.replay.record import Record
from unisono_lab.replay.timeline import (
    UNTOLD,
    Happening,
    Pair,
    compared,
    decision_of,
    decisions_that_hold,
    figure,
    figures,
    folded,
    timeline,
)

if TYPE_CHECKING:
    from unisono_lab.replay.replay import Replay


OPEN_LOOP = (
    "The replay sees what the run measured, which does not react to what it decides; only batch size and learning rate "
    "follow its decisions."
)
NO_DECISIONS = (
    "No policy decided anything in this run. Give it one with unisono run --policy or unisono.init(policies=…); "
    "unisono replay --policy NAME shows what one would have done."
)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of this command."""

    policy: Annotated[list[str] | None, opt()] = None
    """Show what this policy would have decided in the run: noise-scale, or module:Class; repeat for more. It sees what
    the run measured, which does not react to its decisions: only batch size and learning rate follow them.
    """
    plot: Annotated[Path | None, opt(metavar="FILE")] = None
    """Draw a chart, too: .png, .svg or .pdf. Needs matplotlib: pip install matplotlib."""
    everything: Annotated[bool, opt("--all")] = False
    """Print a row for each decision and each event, even where many are alike."""
    as_json: Annotated[bool, opt("--json")] = False
    """Print lines of JSON, for programs."""


@grouped
def replay(
    run: Annotated[Path, typer.Argument(autocompletion=run_folders, metavar="RUN", help="The run folder.")],
    *,
    own: ReplayOptions,
) -> None:
    """Show what was decided in a run, when and why; or what a policy would have done in it."""
    if own.plot is not None:
        from unisono_lab.report.drawing import require_drawable, save
        from unisono_lab.report.replay_picture import Picture, drawn

        require_drawable(own.plot)
    record = Record.read(run)
    for words in record.damaged:
        typer.echo(f"unisono: {words}", err=True)
    replayed = _replayed(record, own.policy) if own.policy else None
    out = Console(highlight=False, emoji=False)
    if replayed is None:
        _show_timeline(record, out, everything=own.everything, as_json=own.as_json)
    else:
        _show_comparison(record, replayed, out, everything=own.everything, as_json=own.as_json)
    if own.plot is not None:
        save(drawn(Picture(record, replayed)), own.plot)
        typer.echo(f"written: {own.plot}", err=own.as_json)


def _replayed(record: Record, names: Sequence[str]) -> Replay:
    from unisono_lab.replay.replay import replay as replayed  # it loads torch

    sys.path.insert(0, os.getcwd())  # noqa: PTH109 (a string); a module of the user's lies where he stands
    return replayed(record, policies_named(names, record.batch_size))


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


# Timelines as tables, and as lines for programs.


def timeline_table(happenings: Sequence[Happening], *, unfolded: bool) -> Table:
    """What happened, a row each; the same verb of one policy at steps in a row is one row."""
    table = _table("step", "after", "event")
    table.add_column("what", ratio=1, overflow="fold")
    numbered = list(enumerate(happenings))
    rows = folded(numbered, _kind, lambda one: one[1].step) if not unfolded else [[one] for one in numbered]
    for row in rows:
        first, last = row[0][1], row[-1][1]
        what = _decisions([decision_of(one.line) for _, one in row]) if first.event == "decided" else Text(first.words)
        table.add_row(_steps(first.step, last.step), _after(first.seconds), first.event, what)
    return table


def comparison_table(pairs: Sequence[Pair], *, unfolded: bool) -> Table:
    """What was decided beside what would have been, folded in the same way."""
    table = _table("step", "policy")
    for name in ("in the run", "in the replay"):
        table.add_column(name, ratio=1, overflow="fold")
    kinds = (lambda pair: (pair.policy, pair.verb, pair.likeness)) if not unfolded else id
    for group in folded(pairs, kinds, lambda pair: pair.step):
        run = [pair.run for pair in group if pair.run is not None]
        replay = [pair.replay for pair in group if pair.replay is not None]
        same = group[0].likeness == "alike"
        table.add_row(
            _steps(group[0].step, group[-1].step),
            group[0].policy,
            _decisions(run, named=False),
            Text("the same", "dim") if same else _decisions(replay, named=False),
        )
    return table


def timeline_lines(happenings: Sequence[Happening]) -> Iterator[dict[str, Any]]:
    """The lines of the journal, each with the seconds since the first."""
    return ({"after_s": one.seconds, **one.line} for one in happenings)


def comparison_lines(pairs: Sequence[Pair]) -> Iterator[dict[str, Any]]:
    """A value each: the step, the policy, the verb, how the two compare, and both."""
    for pair in pairs:
        about = {"step": pair.step, "policy": pair.policy, "verb": pair.verb, "likeness": pair.likeness}
        yield {**about, "run": _plain(pair.run), "replay": _plain(pair.replay)}


def _kind(one: tuple[int, Happening]) -> Any:
    number, happening = one
    if happening.event != "decided":
        return number
    decision = decision_of(happening.line)
    return decision.policy, decision.verb


def _table(*fixed: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), expand=True, pad_edge=False)
    for name in fixed:
        table.add_column(name, justify="right" if name in ("step", "after") else "left", no_wrap=name != "policy")
    return table


def _steps(first: int | None, last: int | None) -> str:
    if first is None:
        return ""
    return str(first) if first == last else f"{first}-{last}"


def _after(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.3f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _decisions(decisions: Sequence[Decision], *, named: bool = True) -> Text:
    """One, or the first and the last of several: what is to be done, and below it the figures."""
    if not decisions:
        return Text("")
    first, last = decisions[0], decisions[-1]
    value = "" if first.value is None else figure(first.value)
    if len(decisions) > 1 and first.value != last.value:
        value = f"{value} … {figure(last.value)}"
    if first.shards is not None:
        value = f"{value}, shards={first.shards}"
    text = Text(f"{first.policy}: " if named else "").append(f"{first.verb}({value})", "bold")
    why = figures(first.why)
    if len(decisions) > 1 and first.why != last.why:
        why = f"{why} … {figures(last.why)}"
    return text.append(f"\n{why}", "dim") if why else text


def _plain(decision: Decision | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    cut = {} if decision.shards is None else {"shards": decision.shards}
    return {"value": decision.value, "why": dict(decision.why), **cut}
