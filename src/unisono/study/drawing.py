"""Charts as files, and as a part of a page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import JobError
from unisono.study.charts import FAINT, INK, PAPER, Chart

DPI = 160

VARIABLES: Mapping[str, str] = {INK: "currentColor", FAINT: "var(--faint)", PAPER: "var(--paper)"}
"""Colours of a page that is light or dark; a picture in it takes them over."""

IDENTITY = re.compile(r"(\bid=\"|(?:xlink:)?href=\"#|url\(#)")


def save(chart: Chart, folder: Path) -> list[Path]:
    """Write a chart as PNG and as SVG, on white.

    Raises:
        JobError: it cannot be written.
    """
    paths = [folder / f"{chart.name}.{suffix}" for suffix in ("png", "svg")]
    try:
        paths[0].write_bytes(png(chart))
        paths[1].write_bytes(_svg(chart, white=True))
    except OSError as error:
        raise JobError(f"the charts cannot be written into {folder}: {error}") from error
    return paths


def png(chart: Chart, dpi: int = DPI) -> bytes:
    """A chart on white."""
    file = io.BytesIO()
    chart.figure.savefig(file, format="png", dpi=dpi, facecolor=PAPER, metadata={"Software": None})
    return file.getvalue()


def inline(chart: Chart) -> str:
    """A chart as an element of an HTML page: transparent, in the page's colours, with names that no other chart has."""
    text = _svg(chart, white=False).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"^<svg ([^>]*?)\bwidth=\"[^\"]*\"", r"<svg \1", text, count=1)
    text = re.sub(r"^<svg ([^>]*?)\bheight=\"[^\"]*\"", r"<svg \1", text, count=1)
    text = IDENTITY.sub(rf"\1{chart.name}-", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg ", '<svg aria-hidden="true" ', 1)


def _svg(chart: Chart, *, white: bool) -> bytes:
    import matplotlib as mpl

    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": chart.name, "svg.fonttype": "path"}):  # the same bytes from the same figures
        chart.figure.savefig(file, format="svg", facecolor=PAPER if white else "none", metadata={"Date": None})
    return file.getvalue()
