"""Charts in files, and as a part of a page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from unisono_lab.report.charts import PAPER, PART_COLOURS, SERIES, Chart
from unisono_lab.report.document import Document
from unisono_lab.timeline.picture import FAINT, INK

DPI = 190

COLOURS = tuple(dict.fromkeys([*SERIES, *PART_COLOURS.values()]))

VARIABLES: Mapping[str, str] = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    PAPER: "var(--paper)",
    **{colour: f"var(--s{place})" for place, colour in enumerate(COLOURS)},
}
"""Colours of a page that is light or dark; a picture in it takes them over."""

IDENTITY = re.compile(r"(\bid=\"|(?:xlink:)?href=\"#|url\(#)")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart as it is in files, on white.

    Attributes:
        png: the bytes of the PNG file, also used in the PDF.
        svg: the bytes of the SVG file.
        shape: the width and the height, in inches.
    """

    png: bytes
    svg: bytes
    shape: tuple[float, float]

    def save(self, folder: Path, name: str) -> None:
        """Write both files.

        Raises:
            OSError: they cannot be written.
        """
        (folder / f"{name}.png").write_bytes(self.png)
        (folder / f"{name}.svg").write_bytes(self.svg)


def drawn(chart: Chart) -> Drawing:
    """Draw a chart: the same bytes from the same figures."""
    import matplotlib as mpl

    figure = chart.figure
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # all has its place now, and finding it takes as long as drawing
    files = {"png": io.BytesIO(), "svg": io.BytesIO()}
    metadata = {"png": {"Software": None}, "svg": {"Date": None}}
    with mpl.rc_context({"svg.hashsalt": chart.name, "svg.fonttype": "path"}):
        for kind, file in files.items():
            figure.savefig(file, format=kind, dpi=DPI, facecolor=PAPER, metadata=metadata[kind])
    width, height = figure.get_size_inches()
    return Drawing(files["png"].getvalue(), files["svg"].getvalue(), (float(width), float(height)))


def inline(name: str, drawing: Drawing) -> str:
    """A chart as an element of an HTML page: in the page's colours, and with identifiers that no other chart has."""
    text = drawing.svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    opening, rest = text.split(">", 1)
    opening = re.sub(r"\s(?:width|height)=\"[^\"]*\"", "", opening)
    text = IDENTITY.sub(rf"\1{name}-", f'{opening} aria-hidden="true">{rest}')
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text


# A report as one HTML file that needs nothing else: no network, no script.

FORK_SERVER = "report.html"


def page(document: Document, drawings: Mapping[str, Drawing]) -> str:
    """The report, light or dark as the reader's screen is. Whatever labels hold is text, never markup.

    Args:
        document: the document's content.
        drawings: the drawings of its charts, by their names.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    text = files(__package__).joinpath(FORK_SERVER).read_text(encoding="utf-8")
    drawn = {name: Markup(inline(name, one)) for name, one in drawings.items()}  # noqa: S704 (matplotlib has escaped it)
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(text)
    return str(template.render(document=document, drawn=drawn))
