"""Whether all numbers of workers trained the same."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.study.analysis.analysis import Curve
from unisono.study.analysis.summary import Row
from unisono.study.analysis.wording import listed, number

ALIKE = 1e-5
"""Relative difference of losses that rounding alone may make."""


def correctness(curve: Curve) -> str:
    """What digests and losses say, in a sentence or two."""
    rows = [row for row in curve.rows if row.digests]
    unsteady = [str(row.workers) for row in rows if len(row.digests) > 1]
    if unsteady:
        return (
            f"Repeated runs with {listed(unsteady)} workers ended with different weights: the training is not "
            f"deterministic (or the runs were not alike), so its losses are compared with care."
        )
    digests = {digest for row in rows for digest in row.digests}
    if curve.mode == "strong" and len(digests) == 1 and len(rows) > 1:
        workers = listed([str(row.workers) for row in rows])
        more = "" if len(rows) == len(curve.rows) else " (the others told no digest)"
        runs = sum(len(row.cells) for row in rows)
        return (
            f"All {runs} runs with {workers} workers ended with the same weights, bit for bit{more}: SHA-256 "
            f"{next(iter(digests))[:16]}…"
        )
    if curve.mode == "strong" and len(digests) > 1:
        return f"Different numbers of workers ended with different weights. {_losses(curve.rows)}"
    return _losses(curve.rows, weak=curve.mode == "weak")


def _losses(rows: Sequence[Row], *, weak: bool = False) -> str:
    known = [row for row in rows if row.loss is not None]
    if len(known) < 2:
        return (
            "Neither digests nor losses were recorded for two numbers of workers: nothing shows that all trained alike."
        )
    losses = [row.loss for row in known if row.loss is not None]
    said = listed([f"{number(row.loss)} with {row.workers}" for row in known])
    if weak:
        return f"The batch grows with the workers, so the weights differ; losses after the same samples: {said}."
    apart = (max(losses) - min(losses)) / max(abs(loss) for loss in losses) if any(losses) else 0.0
    if apart <= ALIKE:
        return f"Losses after the same samples are alike (within {apart:.1e} of each other): {said}."
    return f"Losses after the same samples differ by up to {100 * apart:.2g} %: {said}."
