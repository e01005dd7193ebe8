"""``unisono replay``: the decisions of policies in a run, with their times and reasons."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.adapt.policy_names import policies_named
from unisono.adapt.view import Decision
from unisono.cli.display import show_table
from unisono.cli.options import grouped, opt, run_folders
from unisono.errors import JobError
from unisono.jsonl import to_json
from unisono_lab.recorded.record import (
    HIDDEN_EVENTS,
    JournalEvent,
    Pair,
    Record,
    compared,
    decision_of,
    figure,
    figures,
    folded,
    timeline,
    valid_decisions,
)
from unisono_lab.report.drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    RED,
    SKY,
    doubling,
    explain_below,
    panels,
    require_drawable,
    save,
)

if TYPE_CHECKING:
    from unisono_lab.recorded.policy_replay import Replay

MARKS: Mapping[str, tuple[str, str]] = {
    "set_batch_size": (BLUE, "s"),
    "set_learning_rate": (ORANGE, "|"),
    "resize": (GREEN, "^"),
    "replace": (GREEN, "v"),
    "set_topology": (PINK, "P"),
    "set_balance": (PINK, "d"),
    "checkpoint": (SKY, "D"),
    "stop": (RED, "X"),
}
"""The colour and the shape of the mark of each verb."""

OTHER_MARK = (PINK, "o")


WITHOUT_LINE = ("set_learning_rate", "measure_links", "checkpoint")
"""Verbs that may come in every step: lines through all panels would hide the curves."""


class Picture:
    """The data of a chart, with the replayed decisions of policies or without.

    Raises:
        JobError: there is nothing to draw.
    """

    def __init__(self, record: Record, replay: Replay | None) -> None:
        self.lines = record.steps
        if not self.lines:
            raise JobError(f"{record.path / 'metrics.jsonl'} holds no step: there is nothing to draw")
        self.name, self.replay = record.path.name, replay
        self.steps = [line["step"] + 1 for line in self.lines]
        self.decisions = valid_decisions(record.journal)
        self.lanes: dict[str, list[tuple[int, Decision]]] = {}  # the decisions of each policy, by its lane's name
        for suffix, decisions in (("", self.decisions), (" (replay)", replay.decisions if replay else [])):
            for step, decision in decisions:
                self.lanes.setdefault(f"{decision.policy}{suffix}", []).append((step, decision))

    def values(self, name: str) -> list[float]:
        """The figure of this name for each step; NaN where a step has none."""
        return [math.nan if line.get(name) is None else float(line[name]) for line in self.lines]

    def stairs(self, axis: Any, values: Sequence[float], colour: str, **more: Any) -> None:
        """Draw values that hold until they change."""
        axis.plot(self.steps, values, color=colour, linewidth=1.4, drawstyle="steps-pre", **more)

    def replayed(self, axis: Any, field: int, label: str) -> None:
        """Draw the values that the policies of the replay would have set.

        ``field`` is the place of the setting in an entry of ``replay.settings``, whose first value is the step.
        """
        if self.replay is not None:
            # A decision after a step shows from the next step on.
            steps, values = zip(*((setting[0], float(setting[field])) for setting in self.replay.settings), strict=True)
            axis.plot(steps, values, color=ORANGE, linewidth=1.4, linestyle="--", drawstyle="steps-pre", label=label)


def drawn(picture: Picture) -> Any:
    """The matplotlib figure."""
    lanes = picture.lanes
    heights = [*([0.15 + 0.42 * len(lanes)] if lanes else []), *([1.6] * 5)]
    options = {"sharex": True, "gridspec_kw": {"height_ratios": heights}}
    figure, rows = panels(len(heights), 1, 9, 1.2 + sum(heights), **options)
    axes = rows[:, 0]
    loss, batch, rate, workers, throughput = measured = axes[-5:]
    loss.plot(picture.steps, picture.values("loss"), color=INK, linewidth=1)
    loss.set_ylabel("loss")
    _batch(batch, picture)
    _rate(rate, picture)
    _workers(workers, picture)
    throughput.plot(picture.steps, picture.values("samples_per_s"), color=INK, linewidth=0.8)
    throughput.set_ylim(bottom=0)
    throughput.set_ylabel("samples / s")
    for axis in measured:
        _mark(axis, picture)
    for axis in axes:
        axis.margins(x=0.01)
    axes[-1].set_xlabel("steps")
    figure.align_ylabels(measured)
    figure.suptitle(picture.name, fontsize="medium", color=INK)
    if lanes:
        _lanes(axes[0], lanes)
        explain_below(figure, axes[:1], 5)
    return figure


def _batch(axis: Any, picture: Picture) -> None:
    if any(line.get("noise_scale") is not None for line in picture.lines):
        axis.plot(picture.steps, picture.values("noise_scale"), color=PINK, linewidth=1, label="noise scale")
    points = [*zip(picture.steps, picture.values("batch_size"), picture.lines, strict=True)]
    full = [point for point in points if not point[2].get("ends_epoch")]  # without the smaller batch at an epoch's end
    steps, sizes, _ = zip(*(full or points), strict=True)
    axis.plot(steps, sizes, color=BLUE, linewidth=1.4, drawstyle="steps-pre", label="batch size")
    picture.replayed(axis, 1, "batch size (replay)")
    doubling(axis, "y")
    axis.set_ylabel("samples")
    _explain(axis)


def _rate(axis: Any, picture: Picture) -> None:
    rates = [rate * line.get("lr_factor", 1.0) for rate, line in zip(picture.values("lr"), picture.lines, strict=True)]
    picture.stairs(axis, rates, BLUE, label="run")
    if picture.replay is not None:
        picture.replayed(axis, 2, "replay")
        _explain(axis)
    axis.set_ylabel("learning rate")


def _workers(axis: Any, picture: Picture) -> None:
    from matplotlib.ticker import MaxNLocator

    workers = picture.values("world_size")
    picture.stairs(axis, workers, INK)
    axis.set_ylim(0, max(workers) + 1)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("workers")


def _lanes(axis: Any, lanes: Mapping[str, Sequence[tuple[int, Decision]]]) -> None:
    names = list(lanes)
    used = {decision.verb for lane in lanes.values() for _, decision in lane}
    for verb in sorted(used, key=lambda verb: [*MARKS, verb].index(verb)):
        colour, shape = MARKS.get(verb, OTHER_MARK)
        points = [
            (step, row) for row, name in enumerate(names) for step, decision in lanes[name] if decision.verb == verb
        ]
        axis.plot(*zip(*points, strict=True), shape, color=colour, markersize=6, linestyle="none", label=verb)
    for row, name in enumerate(names):  # above its lane: names may be long
        axis.text(0, row - 0.3, name, transform=axis.get_yaxis_transform(), fontsize="small", color=INK)
    axis.set_yticks([])
    axis.grid(visible=False)
    axis.spines["left"].set_visible(False)
    axis.set_ylim(len(names) - 0.6, -0.8)


def _mark(axis: Any, picture: Picture) -> None:
    for step, decision in picture.decisions:
        if decision.verb not in WITHOUT_LINE:
            colour, _ = MARKS.get(decision.verb, OTHER_MARK)
            axis.axvline(step, color=colour, linewidth=0.8, linestyle=":", zorder=0)


def _explain(axis: Any) -> None:
    axis.legend(loc="upper left", bbox_to_anchor=(0, 1.22), ncols=3, fontsize="small", frameon=False, borderaxespad=0)


OPEN_LOOP = (
    "The policies see the figures of the run, which do not react to their decisions; only batch size and learning rate "
    "follow them."
)
NO_DECISIONS = (
    "No policy decided anything in this run. Give it one with unisono run --policy or unisono.init(policies=…); "
    "unisono replay --policy NAME shows what that policy would have decided."
)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of this command."""

    policy: Annotated[list[str] | None, opt()] = None
    """Show what this policy would have decided in the run: noise-scale, or module:Class; repeat for more. It sees the
    figures of the run, which do not react to its decisions: only batch size and learning rate follow them.
    """
    plot: Annotated[Path | None, opt(metavar="FILE")] = None
    """Also draw a chart into this .png, .svg or .pdf file. This needs matplotlib: pip install matplotlib."""
    everything: Annotated[bool, opt("--all")] = False
    """Print a row for each decision and each event, even if many are alike."""
    as_json: Annotated[bool, opt("--json")] = False
    """Print lines of JSON, for programs."""


@grouped
def replay(
    run: Annotated[Path, typer.Argument(autocompletion=run_folders, metavar="RUN", help="The run folder.")],
    *,
    options: ReplayOptions,
) -> None:
    """Show the decisions in a run, or those of another policy.

    Each has its time and its reason.
    """
    if options.plot is not None:
        require_drawable(options.plot)
    record = Record.read(run)
    for words in record.damaged:
        typer.echo(f"unisono: {words}", err=True)
    replayed = _replayed(record, options.policy) if options.policy else None
    out = Console(highlight=False, emoji=False)
    if replayed is None:
        _show_timeline(record, out, options)
    else:
        _show_comparison(record, replayed, out, options)
    if options.plot is not None:
        save(drawn(Picture(record, replayed)), options.plot)
        typer.echo(f"written: {options.plot}", err=options.as_json)


def _replayed(record: Record, names: Sequence[str]) -> Replay:
    from unisono_lab.recorded.policy_replay import replay as replayed  # this module loads torch

    sys.path.insert(0, os.getcwd())  # noqa: PTH109 (a string); user modules are in the working directory
    return replayed(record, policies_named(names, record.batch_size))


def _show_timeline(record: Record, out: Console, options: ReplayOptions) -> None:
    events = [event for event in timeline(record.journal) if options.everything or event.event not in HIDDEN_EVENTS]
    if options.as_json:
        for event in events:
            typer.echo(to_json({"after_s": event.seconds, **event.line}), nl=False)
        return
    show_table(timeline_table(events, unfolded=options.everything), out)
    if not any(event.event == "decided" for event in events):
        out.print(Text(NO_DECISIONS), soft_wrap=True)


def _show_comparison(record: Record, replayed: Replay, out: Console, options: ReplayOptions) -> None:
    pairs = compared(valid_decisions(record.journal), replayed.decisions)
    if options.as_json:
        for pair in pairs:
            about = {"step": pair.step, "policy": pair.policy, "verb": pair.verb, "likeness": pair.likeness}
            typer.echo(to_json({**about, "run": _plain(pair.run), "replay": _plain(pair.replay)}), nl=False)
    elif pairs:
        show_table(comparison_table(pairs, unfolded=options.everything), out)
    for words in _notes(pairs, replayed):
        typer.echo(words, err=options.as_json)


def _notes(pairs: Sequence[Pair], replayed: Replay) -> Iterator[str]:
    counts = Counter(pair.likeness for pair in pairs)
    listing = ", ".join(f"{count} {likeness}" for likeness, count in sorted(counts.items()))
    yield f"Decisions: {listing or 'none, neither in the run nor in the replay'}."
    yield OPEN_LOOP
    if replayed.stopped is not None:
        yield f"The replay ends the loop after step {replayed.stopped}; it does not see the later steps of the run."
    if replayed.unwatched:
        yield f"The run measured no gradients in {replayed.unwatched} of the steps; there policies see older ones."
    if replayed.untimed:
        yield f"The run recorded no times of workers in {replayed.untimed} of the steps; there policies see older ones."
    if replayed.gaps:
        steps = ", ".join(map(str, replayed.gaps[:10])) + (" …" if len(replayed.gaps) > 10 else "")
        yield f"The policies were not asked after these steps, which are not recorded: {steps}"


# Timelines as tables, and as lines for programs.


def timeline_table(events: Sequence[JournalEvent], *, unfolded: bool) -> Table:
    """A row for each event; decisions of one policy with the same verb at successive steps share a row."""
    table = _table("step", "after", "event")
    table.add_column("what", ratio=1, overflow="fold")
    numbered = list(enumerate(events))
    rows = folded(numbered, _kind, lambda entry: entry[1].step) if not unfolded else [[entry] for entry in numbered]
    for row in rows:
        first, last = row[0][1], row[-1][1]
        cell = (
            _decisions([decision_of(entry.line) for _, entry in row]) if first.event == "decided" else Text(first.text)
        )
        table.add_row(_steps(first.step, last.step), _after(first.seconds), first.event, cell)
    return table


def comparison_table(pairs: Sequence[Pair], *, unfolded: bool) -> Table:
    """The decisions of the run beside those of the replay; similar ones at successive steps share a row."""
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


def _kind(entry: tuple[int, JournalEvent]) -> Any:
    number, event = entry
    if event.event != "decided":
        return number
    decision = decision_of(event.line)
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
    """One decision, or the first and the last of several: the verb with its value, and below it the figures."""
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
