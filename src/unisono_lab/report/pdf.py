"""A report as a PDF file, to be handed in."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from unisono_lab.analysis.estimate import JOINED
from unisono_lab.report.charts import Chart
from unisono_lab.report.document import Block, Document
from unisono_lab.report.drawing import Drawing
from unisono_lab.report.written_table import Field, WrittenTable
from unisono_lab.timeline.picture import FAINT, INK

MARGIN = 48.0
"""Points."""

PADDING = 6.0
"""Of reportlab's frames."""

FONT, BOLD, MONO = "DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono"
"""Those that matplotlib brings along: the fonts that every PDF reader has know no Greek."""

SOFT, ACCENT, PANEL = "#59636e", "#0072b2", "#f2f4f7"

SIZE, CELL, BELOW = 9.0, 7.6, 6.4
"""Of letters, in points: of prose, in tables, and of intervals."""

Flowables = Iterator[Any]


def pdf(document: Document, drawings: Mapping[str, Drawing]) -> bytes:
    """The report on A4 pages, with their numbers.

    Args:
        document: the document's content.
        drawings: the drawings of its charts, by their names.
    """
    from reportlab.lib.pagesizes import A4
    from reportlab.platypus import SimpleDocTemplate

    _register_fonts()
    file = io.BytesIO()
    frame = {"leftMargin": MARGIN, "rightMargin": MARGIN, "topMargin": MARGIN, "bottomMargin": MARGIN}
    writer = SimpleDocTemplate(file, pagesize=A4, title=document.title, author="", invariant=1, **frame)
    writer.build(
        list(_story(document, _Setting(writer.width - 2 * PADDING, _styles(), drawings))),
        onFirstPage=_footer,
        onLaterPages=_footer,
    )
    return file.getvalue()


def _register_fonts() -> None:
    from matplotlib import get_data_path
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont

    known = pdfmetrics.getRegisteredFontNames()
    for name in (FONT, BOLD, MONO):
        if name not in known:
            pdfmetrics.registerFont(TTFont(name, str(Path(get_data_path(), "fonts", "ttf", f"{name}.ttf"))))
    pdfmetrics.registerFontFamily(FONT, normal=FONT, bold=BOLD, italic=FONT, boldItalic=BOLD)


def _footer(canvas: Any, writer: Any) -> None:
    canvas.saveState()
    canvas.setFont(FONT, 7.5)
    canvas.setFillColor(SOFT)
    canvas.drawRightString(writer.pagesize[0] - MARGIN, MARGIN / 2, str(writer.page))
    canvas.restoreState()


def _styles() -> Mapping[str, Any]:
    from reportlab.lib.styles import ParagraphStyle

    base = ParagraphStyle("prose", fontName=FONT, fontSize=SIZE, leading=13, textColor=INK, spaceAfter=4)
    cell = ParagraphStyle("word", base, fontSize=CELL, leading=9.6, spaceAfter=0)
    return {
        "prose": base,
        "title": ParagraphStyle("title", base, fontName=BOLD, fontSize=19, leading=24, spaceAfter=10),
        "heading": ParagraphStyle(
            "heading", base, fontName=BOLD, fontSize=12.5, leading=16, spaceBefore=14, spaceAfter=6, keepWithNext=1
        ),
        "verdict": ParagraphStyle("verdict", base, fontName=BOLD, fontSize=10, leading=14.5, spaceAfter=0),
        "bullet": ParagraphStyle("bullet", base, leftIndent=12, bulletIndent=2),
        "code": ParagraphStyle(
            "code", base, fontName=MONO, fontSize=7.6, leading=10.5, backColor=PANEL, borderPadding=5, spaceAfter=12
        ),
        "caption": ParagraphStyle("caption", base, fontSize=7.6, leading=10, textColor=SOFT),
        "word": cell,
        "figure": ParagraphStyle("figure", cell, alignment=2),
        "word head": ParagraphStyle("word head", cell, fontName=BOLD),
        "figure head": ParagraphStyle("figure head", cell, fontName=BOLD, alignment=2),
    }


@dataclass(frozen=True, slots=True)
class _Setting:
    """The settings that all parts of a page need: its width in points, styles by name, and drawings."""

    width: float
    styles: Mapping[str, Any]
    drawings: Mapping[str, Drawing]


def _story(document: Document, setting: _Setting) -> Flowables:
    """Everything, in its order."""
    from reportlab.platypus import Paragraph, Spacer, Table

    styles = setting.styles
    yield Paragraph(_text(document.title), styles["title"])
    said = [[Paragraph(_text(words), styles["verdict"])] for words in document.verdict]
    sides = [("LEFTPADDING", (0, 0), (-1, -1), 10), ("LINEBEFORE", (0, 0), (0, -1), 3, ACCENT)]
    yield Table(said, colWidths=[setting.width], style=[("BACKGROUND", (0, 0), (-1, -1), PANEL), *sides], splitInRow=1)
    yield Spacer(0, 8)
    for words in document.advice:
        yield Paragraph(_text(words), styles["prose"])
    for section in document.sections:
        yield Paragraph(_text(section.title), styles["heading"])
        for block in section.blocks:
            yield from _block(block, setting)


def _block(block: Block, setting: _Setting) -> Flowables:
    from reportlab.platypus import Paragraph, Preformatted, Spacer

    styles = setting.styles
    if block.kind == "prose":
        yield from (Paragraph(_text(words), styles["prose"]) for words in block.texts)
    elif block.kind == "bullets":
        yield from (Paragraph(_text(words), styles["bullet"], bulletText="•") for words in block.texts)
    elif block.kind == "code":
        for words in block.texts:
            yield Spacer(0, 4)
            yield Preformatted(_plain(words), styles["code"], maxLineLength=100, splitChars=" /,;=", newLineChars="  ")
    elif block.kind == "terms":
        yield from (
            Paragraph(f"<b>{_text(word)}</b>: {_text(meaning)}", styles["prose"]) for word, meaning in block.terms
        )
    elif block.kind == "pictures":
        yield from _pictures(block.pictures, setting)
    elif block.table is not None and block.table.rows:
        yield from _table(block.table, setting)


def _pictures(charts: Sequence[Chart], setting: _Setting) -> Flowables:
    """Two beside each other."""
    from reportlab.platypus import Image, Paragraph, Table

    gap = 14.0
    styles, each = setting.styles, (setting.width - gap) / 2
    cells = []
    for chart in charts:
        drawing = setting.drawings[chart.name]
        wide, high = drawing.shape
        picture = Image(io.BytesIO(drawing.png), width=each, height=each * high / wide)
        title = Paragraph(_text(chart.title), styles["word head"])
        cells.append([title, picture, Paragraph(_text(chart.words), styles["caption"])])
    rows: list[list[Any]] = [cells[place : place + 2] for place in range(0, len(cells), 2)]
    if len(cells) % 2:
        rows[-1].append("")
    look = [
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
        ("LEFTPADDING", (0, 0), (-1, -1), 0),
        ("RIGHTPADDING", (0, 0), (-1, -1), 0),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 10),
        ("RIGHTPADDING", (0, 0), (0, -1), gap),
    ]
    for row in rows:
        yield Table([row], colWidths=[each + gap, each], style=look, hAlign="LEFT")


def _table(table: WrittenTable, setting: _Setting) -> Flowables:
    from reportlab.platypus import Paragraph, Spacer, Table

    def words(place: int, text: str, ending: str = "") -> Any:
        kind = "word" if place < table.text_columns else "figure"
        return Paragraph(text, setting.styles[f"{kind}{ending}"])

    head = [words(place, _text(name), " head") for place, name in enumerate(table.head)]
    rows = [[words(place, _field(field)) for place, field in enumerate(row)] for row in table.rows]
    look = [
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
        ("VALIGN", (0, 0), (-1, 0), "BOTTOM"),
        ("LEFTPADDING", (0, 0), (-1, -1), 4),
        ("RIGHTPADDING", (0, 0), (-1, -1), 4),
        ("TOPPADDING", (0, 0), (-1, -1), 2.5),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 3),
        ("LINEBELOW", (0, 0), (-1, 0), 0.9, INK),
        ("LINEBELOW", (0, 1), (-1, -1), 0.4, FAINT),
    ]
    yield Spacer(0, 4)
    yield Table(
        [head, *rows], colWidths=_widths(table, setting.width), style=look, repeatRows=1, splitInRow=1, hAlign="LEFT"
    )
    yield Spacer(0, 2)
    if table.note:
        yield Paragraph(_text(table.note), setting.styles["caption"])
    yield Spacer(0, 6)


def _widths(table: WrittenTable, width: float) -> list[float]:
    """As wide as what stands in the columns; if that is wider than the page, the widest give way."""
    from reportlab.pdfbase.pdfmetrics import stringWidth

    found = []
    for place, name in enumerate(table.head):
        longest_word = max((stringWidth(word, BOLD, CELL) for word in name.split()), default=0.0)
        texts = [stringWidth(_plain(row[place].text), FONT, CELL) for row in table.rows]
        texts += [stringWidth(_plain(row[place].below), FONT, BELOW) for row in table.rows]
        found.append(10.0 + max([longest_word, *texts]))
    while sum(found) > width:
        place = found.index(max(found))
        second = max([part for at, part in enumerate(found) if at != place], default=0.0)
        over = sum(found) - width
        found[place] = max(found[place] - over, second * 0.97, width / (2 * len(found)))
        if found[place] <= width / (2 * len(found)):
            break
    return found


def _field(field: Field) -> str:
    below = f"<br/><font size={BELOW} color='{SOFT}'>{_text(field.below)}</font>" if field.below else ""
    return f"{_text(field.text)}{below}"


def _text(words: str) -> str:
    """Words that are no markup."""
    return escape(_plain(words))


def _plain(words: str) -> str:
    """Without what cannot be printed."""
    return "".join(letter if letter.isprintable() or letter == JOINED else " " for letter in words)
