"""A picture of a run: what was measured, and where something was decided."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.adapt.view import Decision
from unisono.errors import JobError
from unisono_lab.replay.record import Record
from unisono_lab.replay.replay import Replay
from unisono_lab.replay.timeline import decisions_that_hold
from unisono_lab.report.drawing import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, doubling, explain_below, panels

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
"""Of each verb: colour and shape."""

OTHER_MARK = (PINK, "o")

DASHED: Mapping[str, Any] = {"color": ORANGE, "linewidth": 1.4, "linestyle": "--", "drawstyle": "steps-pre"}
"""What the replay made of something."""

WITHOUT_LINE = ("set_learning_rate", "measure_links", "checkpoint")
"""Verbs that may come in every step: a line through all panels for each would hide what is behind."""

Panel = Callable[[Any, "Picture"], None]


class Picture:
    """The data of a chart.

    Args:
        record: the run's record.
        replay: the replayed decisions of policies; None to leave them out.

    Raises:
        JobError: there is nothing to draw.
    """

    def __init__(self, record: Record, replay: Replay | None) -> None:
        self.lines = record.steps
        if not self.lines:
            raise JobError(f"{record.path / 'metrics.jsonl'} holds no step: there is nothing to draw")
        self.name = record.path.name
        self.replay = replay
        self.steps = [line["step"] + 1 for line in self.lines]
        self.decisions = decisions_that_hold(record.journal)

    def values(self, name: str) -> list[float]:
        """A figure of each step; NaN where it has none."""
        return [math.nan if line.get(name) is None else float(line[name]) for line in self.lines]

    @property
    def lanes(self) -> dict[str, list[tuple[int, Decision]]]:
        """The decisions of each policy, by what its lane is called."""
        found: dict[str, list[tuple[int, Decision]]] = {}
        for suffix, decisions in (("", self.decisions), (" (replay)", self.replay.decisions if self.replay else [])):
            for step, decision in decisions:
                found.setdefault(f"{decision.policy}{suffix}", []).append((step, decision))
        return found


def drawn(picture: Picture) -> Any:
    """The matplotlib figure."""
    kinds: list[Panel] = [_loss, _batch, _rate, _workers, _throughput]
    lanes = picture.lanes
    heights = [*([0.15 + 0.42 * len(lanes)] if lanes else []), *([1.6] * len(kinds))]
    more = {"sharex": True, "gridspec_kw": {"height_ratios": heights}}
    figure, rows = panels(len(heights), 1, 9, 1.2 + sum(heights), **more)
    axes = rows[:, 0]
    measured = axes[-len(kinds) :]
    for axis, panel in zip(measured, kinds, strict=True):
        panel(axis, picture)
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


def _loss(axis: Any, picture: Picture) -> None:
    axis.plot(picture.steps, picture.values("loss"), color=INK, linewidth=1)
    axis.set_ylabel("loss")


def _batch(axis: Any, picture: Picture) -> None:
    if any(line.get("noise_scale") is not None for line in picture.lines):
        axis.plot(picture.steps, picture.values("noise_scale"), color=PINK, linewidth=1, label="noise scale")
    points = [*zip(picture.steps, picture.values("batch_size"), picture.lines, strict=True)]
    whole = [point for point in points if not point[2].get("ends_epoch")]  # without the rest at an epoch's end
    steps, sizes, _ = zip(*(whole or points), strict=True)
    axis.plot(steps, sizes, color=BLUE, linewidth=1.4, drawstyle="steps-pre", label="batch size")
    if picture.replay is not None:
        axis.plot(*_settings(picture.replay, 1), **DASHED, label="batch size (replay)")
    doubling(axis, "y")
    axis.set_ylabel("samples")
    _explain(axis)


def _rate(axis: Any, picture: Picture) -> None:
    rates = [rate * line.get("lr_factor", 1.0) for rate, line in zip(picture.values("lr"), picture.lines, strict=True)]
    axis.plot(picture.steps, rates, color=BLUE, linewidth=1.4, drawstyle="steps-pre", label="run")
    if picture.replay is not None:
        axis.plot(*_settings(picture.replay, 2), **DASHED, label="replay")
        _explain(axis)
    axis.set_ylabel("learning rate")


def _workers(axis: Any, picture: Picture) -> None:
    from matplotlib.ticker import MaxNLocator

    workers = picture.values("world_size")
    axis.plot(picture.steps, workers, color=INK, linewidth=1.4, drawstyle="steps-pre")
    axis.set_ylim(0, max(workers) + 1)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("workers")


def _throughput(axis: Any, picture: Picture) -> None:
    axis.plot(picture.steps, picture.values("samples_per_s"), color=INK, linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("samples / s")


def _lanes(axis: Any, lanes: Mapping[str, Sequence[tuple[int, Decision]]]) -> None:
    names = list(lanes)
    used = {decision.verb for lane in lanes.values() for _, decision in lane}
    for verb in sorted(used, key=lambda verb: [*MARKS, verb].index(verb)):
        colour, shape = MARKS.get(verb, OTHER_MARK)
        points = [(step, row) for row, name in enumerate(names) for step, one in lanes[name] if one.verb == verb]
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


def _settings(replay: Replay, field: int) -> tuple[list[int], list[float]]:
    """What held in each step: what was decided after it is not yet seen after it."""
    return [setting[0] for setting in replay.settings], [float(setting[field]) for setting in replay.settings]


def _explain(axis: Any) -> None:
    axis.legend(loc="upper left", bbox_to_anchor=(0, 1.22), ncols=3, fontsize="small", frameon=False, borderaxespad=0)
