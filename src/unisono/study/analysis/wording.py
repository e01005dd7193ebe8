"""Figures as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unisono.study.analysis.estimate import Estimate

JOINED = "\u00a0"
"""A blank at which no line ends."""

NOTHING = "–"  # noqa: RUF001 (a dash in an empty field)


def number(value: float | None) -> str:
    """With three or four digits that count: ``1111``, ``45.0``, ``1.88``, ``0.0031``."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.1 or size == 0:
        return f"{value:.2f}"
    return f"{value:.2g}" if size >= 1e-4 else f"{value:.1e}"


def percent(share: float | None) -> str:
    """``94 %``, ``1.9 %``."""
    if share is None:
        return NOTHING
    digits = 0 if abs(share) >= 0.0995 or share == 0 else 1
    return f"{100 * share:.{digits}f}{JOINED}%"


def duration(seconds: float | None) -> str:
    """``12.0 s``, ``85 ms``, ``7 min 30 s``."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{number(1000 * seconds)} ms"
    if seconds < 300:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def interval(estimate: Estimate | None, form: str = "number") -> str:
    """The ends alone, with as many digits as the figure: ``3.61 … 3.89``; empty if there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    if form == "percent":
        return f"{100 * estimate.low:.1f} … {100 * estimate.high:.1f} %"
    return f"{_fixed(estimate.low, estimate.value)} … {_fixed(estimate.high, estimate.value)}"


def shown(label: str, most: int = 48) -> str:
    """What somebody called something, on one line, without what cannot be printed, and not endless."""
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in label).split())
    return words if len(words) <= most else f"{words[: most - 1]}…"


def counted(count: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def _fixed(end: float, value: float) -> str:
    size = abs(value)
    digits = 2 if size == 0 else max(0, min(2, 2 - math.floor(math.log10(size)))) if size >= 0.1 else 4
    return f"{end:.{digits}f}"
