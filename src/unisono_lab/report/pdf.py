"""A report as a PDF file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from matplotlib import get_data_path
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import ParagraphStyle
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.platypus import Image, Paragraph, Preformatted, SimpleDocTemplate, Spacer, Table

from unisono_lab.report.document import Block, Document, Field, WrittenTable
from unisono_lab.report.drawing import FAINT, INK, Chart, Drawing
from unisono_lab.study.estimate import JOINED

MARGIN = 48.0
"""The margins of a page, in points."""

PADDING = 6.0
"""The padding of reportlab's frames, in points."""

GAP = 14.0
"""The space between two charts, in points."""

FONT, BOLD, MONO = "DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono"
"""Fonts that are installed with matplotlib: the standard fonts of PDF have no Greek letters."""

SOFT, ACCENT, PANEL = "#59636e", "#0072b2", "#f2f4f7"

CELL, BELOW = 7.6, 6.4
"""The font sizes of figures and of intervals in tables, in points."""

PROSE = {"fontName": FONT, "fontSize": 9, "leading": 13, "textColor": INK, "spaceAfter": 4}
STRONG = {**PROSE, "fontName": BOLD}
WORD = {**PROSE, "fontSize": CELL, "leading": 9.6, "spaceAfter": 0}
PRINTED = {"fontName": MONO, "fontSize": CELL, "leading": 10.5, "spaceAfter": 12}
LOOKS: Mapping[str, Mapping[str, Any]] = {
    "prose": PROSE,
    "title": {**STRONG, "fontSize": 19, "leading": 24, "spaceAfter": 10},
    "heading": {**STRONG, "fontSize": 12.5, "leading": 16, "spaceBefore": 14, "spaceAfter": 6, "keepWithNext": 1},
    "verdict": {**STRONG, "fontSize": 10, "leading": 14.5, "spaceAfter": 0},
    "bullet": {**PROSE, "leftIndent": 12, "bulletIndent": 2},
    "code": {**PROSE, **PRINTED, "backColor": PANEL, "borderPadding": 5},
    "caption": {**PROSE, "fontSize": CELL, "leading": 10, "textColor": SOFT},
    "word": WORD,
    "figure": {**WORD, "alignment": 2},
    "word head": {**WORD, "fontName": BOLD},
    "figure head": {**WORD, "fontName": BOLD, "alignment": 2},
}

ALL, LEFT, HEAD = ((0, 0), (-1, -1)), ((0, 0), (0, -1)), ((0, 0), (-1, 0))
VERDICT = [("BACKGROUND", *ALL, PANEL), ("LEFTPADDING", *ALL, 10), ("LINEBEFORE", *LEFT, 3, ACCENT)]
PICTURES = [
    ("VALIGN", *ALL, "TOP"),
    *((f"{side}PADDING", *ALL, points) for side, points in (("LEFT", 0), ("RIGHT", 0), ("BOTTOM", 10))),
    ("RIGHTPADDING", *LEFT, GAP),
]
FIGURES = [
    ("VALIGN", *ALL, "TOP"),
    ("VALIGN", *HEAD, "BOTTOM"),
    *((f"{side}PADDING", *ALL, points) for side, points in (("LEFT", 4), ("RIGHT", 4), ("TOP", 2.5), ("BOTTOM", 3))),
    ("LINEBELOW", *HEAD, 0.9, INK),
    ("LINEBELOW", (0, 1), (-1, -1), 0.4, FAINT),
]


def pdf(document: Document, drawings: Mapping[str, Drawing]) -> bytes:
    """The bytes of the PDF file: A4 pages with page numbers."""
    for name in {FONT, BOLD, MONO}.difference(pdfmetrics.getRegisteredFontNames()):
        pdfmetrics.registerFont(TTFont(name, str(Path(get_data_path(), "fonts", "ttf", f"{name}.ttf"))))
    pdfmetrics.registerFontFamily(FONT, normal=FONT, bold=BOLD, italic=FONT, boldItalic=BOLD)
    file = io.BytesIO()
    margins = dict.fromkeys(("leftMargin", "rightMargin", "topMargin", "bottomMargin"), MARGIN)
    writer = SimpleDocTemplate(file, pagesize=A4, title=document.title, author="", invariant=1, **margins)
    story = list(_Layout(writer.width - 2 * PADDING, drawings).story(document))
    writer.build(story, onFirstPage=_footer, onLaterPages=_footer)
    return file.getvalue()


def _footer(canvas: Any, writer: Any) -> None:
    canvas.saveState()
    canvas.setFont(FONT, 7.5)
    canvas.setFillColor(SOFT)
    canvas.drawRightString(writer.pagesize[0] - MARGIN, MARGIN / 2, str(writer.page))
    canvas.restoreState()


class _Layout:
    """Makes reportlab's elements of a report, for text of a width in points."""

    def __init__(self, width: float, drawings: Mapping[str, Drawing]) -> None:
        self._width, self._drawings = width, drawings
        self._styles = {name: ParagraphStyle(name, **look) for name, look in LOOKS.items()}

    def story(self, document: Document) -> Iterator[Any]:
        """The elements of the whole report, in order."""
        yield self._text(document.title, "title")
        verdict = [[self._text(words, "verdict")] for words in document.verdict]
        yield Table(verdict, colWidths=[self._width], style=VERDICT, splitInRow=1)
        yield Spacer(0, 8)
        yield from map(self._text, document.advice)
        for section in document.sections:
            yield self._text(section.title, "heading")
            for block in section.blocks:
                yield from self._block(block)

    def _text(self, words: str, style: str = "prose", **more: Any) -> Any:
        return Paragraph(_markup(words), self._styles[style], **more)

    def _block(self, block: Block) -> Iterator[Any]:
        for words in block.texts:
            if block.kind == "code":
                options = {"maxLineLength": 100, "splitChars": " /,;=", "newLineChars": "  "}
                yield Spacer(0, 4)
                yield Preformatted(_plain(words), self._styles["code"], **options)
            elif block.kind == "bullets":
                yield self._text(words, "bullet", bulletText="•")
            else:
                yield self._text(words)
        for word, meaning in block.terms:
            yield Paragraph(f"<b>{_markup(word)}</b>: {_markup(meaning)}", self._styles["prose"])
        for place in range(0, len(block.pictures), 2):
            yield self._pair(block.pictures[place : place + 2])
        if block.table is not None and block.table.rows:
            yield from self._table(block.table)

    def _pair(self, charts: Sequence[Chart]) -> Any:
        """A table with two charts side by side."""
        width = (self._width - GAP) / 2
        cells: list[Any] = []
        for chart in charts:
            drawing = self._drawings[chart.name]
            picture = Image(io.BytesIO(drawing.png), width=width, height=width * drawing.shape[1] / drawing.shape[0])
            cells.append([self._text(chart.title, "word head"), picture, self._text(chart.words, "caption")])
        row = [*cells, ""][:2]
        return Table([row], colWidths=[width + GAP, width], style=PICTURES, hAlign="LEFT")

    def _table(self, table: WrittenTable) -> Iterator[Any]:
        kinds = ["word" if place < table.text_columns else "figure" for place in range(len(table.head))]
        rows = [[self._text(name, f"{kind} head") for name, kind in zip(table.head, kinds, strict=True)]]
        for row in table.rows:
            fields = zip(row, kinds, strict=True)
            rows.append([Paragraph(_field(field), self._styles[kind]) for field, kind in fields])
        widths = _widths(table, self._width)
        yield Spacer(0, 4)
        yield Table(rows, colWidths=widths, style=FIGURES, repeatRows=1, splitInRow=1, hAlign="LEFT")
        yield Spacer(0, 2)
        if table.note:
            yield self._text(table.note, "caption")
        yield Spacer(0, 6)


def _widths(table: WrittenTable, width: float) -> list[float]:
    """The widths of the columns: those of their texts; if they exceed the page, the widest columns are narrowed."""
    widths = []
    for place, name in enumerate(table.head):
        texts = [(word, BOLD, CELL) for word in name.split()]
        texts += [(row[place].text, FONT, CELL) for row in table.rows]
        texts += [(row[place].below, FONT, BELOW) for row in table.rows]
        widths.append(10.0 + max(pdfmetrics.stringWidth(_plain(text), *font) for text, *font in texts))
    while (excess := sum(widths) - width) > 0:
        place = widths.index(max(widths))
        second = max([part for other, part in enumerate(widths) if other != place], default=0.0)
        widths[place] = max(widths[place] - excess, second * 0.97, width / (2 * len(widths)))
        if widths[place] <= width / (2 * len(widths)):
            break
    return widths


def _field(field: Field) -> str:
    below = f"<br/><font size={BELOW} color='{SOFT}'>{_markup(field.below)}</font>" if field.below else ""
    return f"{_markup(field.text)}{below}"


def _markup(words: str) -> str:
    return escape(_plain(words))


def _plain(words: str) -> str:
    """The words, with spaces in the place of characters that cannot be printed."""
    return "".join(letter if letter.isprintable() or letter == JOINED else " " for letter in words)
