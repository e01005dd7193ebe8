"""What all charts have in common: colours, axes, legends, and how they are written into files and pages."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.errors import JobError

INK, FAINT, PAPER = "#1f2328", "#d3d8de", "#ffffff"

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
"""Colours after Okabe and Ito, which people with any kind of colour vision can tell apart; shapes differ, too."""

BLUE, RED, GREEN, PINK, _, SKY = SERIES
ORANGE = "#e69f00"

SHAPES = ("o", "s", "^", "D", "v", "P")

WIDTH, HEIGHT = 4.9, 3.3
"""The size of a chart, in inches."""

ROOM = 1.06
"""The end of an axis that begins at 0, as a multiple of where it would end by itself."""

DPI, FILE_DPI = 190, 130
"""The resolution of a report's charts, and of charts that are written into a file of their own."""

VARIABLES: Mapping[str, str] = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    PAPER: "var(--paper)",
    **{colour: f"var(--s{place})" for place, colour in enumerate((*SERIES, ORANGE))},
}
"""The CSS colours that replace those of a chart in a page, which may be light or dark."""

IDENTITY = re.compile(r"(\bid=\"|(?:xlink:)?href=\"#|url\(#)")

SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture.

    Attributes:
        name: the name of its files, without an ending.
        words: a description, for readers who cannot see the chart, and how to read it.
    """

    name: str
    title: str
    words: str
    figure: Any


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart as the bytes of files, on a white background."""

    png: bytes
    svg: bytes


def canvas(across: str, up: str, width: float = WIDTH, height: float = HEIGHT) -> tuple[Any, Any]:
    """A figure with one pair of axes, with these labels."""
    figure, ((axis,),) = panels(1, 1, width, height)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    return figure, axis


def panels(rows: int, columns: int, width: float = WIDTH, height: float = HEIGHT, **more: Any) -> tuple[Any, Any]:
    """A figure with rows and columns of axes in the style of all charts."""
    from matplotlib.figure import Figure  # takes a second

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        for part in (*axis.spines.values(), axis.xaxis.label, axis.yaxis.label):
            part.set_color(INK)
        axis.tick_params(colors=INK, which="both")
        axis.grid(axis="y", color=FAINT, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.patch.set_visible(False)
    return figure, axes


def mark(place: int) -> dict[str, str]:
    """The colour and the shape of the series at this place."""
    return {"color": SERIES[place % len(SERIES)], "marker": SHAPES[place % len(SHAPES)]}


def from_zero(axis: Any) -> None:
    """Begin the vertical axis at 0, and leave room above the topmost point."""
    axis.set_ylim(0, ROOM * axis.get_ylim()[1])


def doubling(axis: Any, direction: str) -> None:
    """Make an axis, x or y, logarithmic with base 2, with plain numbers."""
    getattr(axis, f"set_{direction}scale")("log", base=2)
    plain_numbers(getattr(axis, f"{direction}axis"))


def plain_numbers(scale: Any) -> None:
    """Show 16 as 16, not as a power of 2."""
    scale.set_major_formatter(lambda value, _: f"{value:g}")


def explain(figure: Any, axis: Any) -> None:
    """Add a legend above the axes: each name once, measured curves first."""
    handles, labels = axis.get_legend_handles_labels()
    measured = {label for label, handle in zip(labels, handles, strict=True) if hasattr(handle, "has_yerr")}
    first = dict(reversed(list(zip(labels, handles, strict=True))))
    order = sorted(dict.fromkeys(labels), key=lambda label: label not in measured)
    if order:
        columns = 3 if max(map(len, order)) < 14 else 2
        _legend(figure, {label: first[label] for label in order}, "outside upper left", columns)


def explain_below(figure: Any, axes: Sequence[Any], columns: int) -> None:
    """Add a legend below the axes, each name once."""
    pairs = [pair for axis in axes for pair in zip(*reversed(axis.get_legend_handles_labels()), strict=True)]
    _legend(figure, dict(pairs), "outside lower center", columns)


def _legend(figure: Any, named: Mapping[str, Any], place: str, columns: int) -> None:
    look = {"frameon": False, "fontsize": "small", "labelcolor": INK}
    figure.legend(named.values(), named, loc=place, ncols=columns, **look)


def require_drawable(path: Path) -> None:
    """Make sure that a picture can be drawn into a file, before anything else is done.

    Raises:
        JobError: the file's ending is unknown, matplotlib is not installed, or the folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise JobError(f"--plot {path}: end its name with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if find_spec("matplotlib") is None:
        raise JobError("--plot needs matplotlib, which is not installed: pip install '.[plot]' in a clone of Unisono")
    if not path.absolute().parent.is_dir():
        raise JobError(f"--plot {path}: there is no folder {path.absolute().parent}")


def save(figure: Any, path: Path) -> None:
    """Write a figure into a file: PNG, SVG or PDF, by its name.

    Raises:
        JobError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=FILE_DPI, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise JobError(f"--plot {path}: {error}") from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new one."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(data)
    beside.replace(path)


def drawn(chart: Chart) -> Drawing:
    """Draw a chart: the same bytes from the same figures."""
    import matplotlib as mpl

    figure = chart.figure
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # the layout is done, and would be computed again for each file
    files = {"png": io.BytesIO(), "svg": io.BytesIO()}
    metadata = {"png": {"Software": None}, "svg": {"Date": None}}
    with mpl.rc_context({"svg.hashsalt": chart.name, "svg.fonttype": "path"}):
        for kind, file in files.items():
            figure.savefig(file, format=kind, dpi=DPI, facecolor=PAPER, metadata=metadata[kind])
    return Drawing(files["png"].getvalue(), files["svg"].getvalue())


def inline(name: str, drawing: Drawing) -> str:
    """A chart as an SVG element of an HTML page: in the page's colours, with identifiers of its own."""
    text = drawing.svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    opening, rest = text.split(">", 1)
    opening = re.sub(r"\s(?:width|height)=\"[^\"]*\"", "", opening)
    text = IDENTITY.sub(rf"\1{name}-", f'{opening} aria-hidden="true">{rest}')
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text
