"""Timelines as tables, and as lines for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from unisono.adapt.view import Decision
from unisono.study.replay.timeline import Happening, Pair, decision_of, figure, figures, folded


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
