"""Reports of scaling studies: from figures that are there already, and of two studies beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.errors import JobError

if TYPE_CHECKING:
    from unisono.study.analysis import Wanted
    from unisono.study.results import Results
    from unisono.study.written_table import WrittenTable


def wanted_of(
    title: str, predict: str | None = None, threshold: float = 0.8, price: float | None = None, waiting: float = 0.0
) -> Wanted:
    """What options say of a report.

    Args:
        title: of the report.
        predict: numbers of workers, ``8,16``; None for twice and four times as many as were measured.
        threshold: the efficiency asked for, 0 … 1.
        price: of a worker's hour; None to leave costs out.
        waiting: what an hour earlier is worth, in the same currency.

    Raises:
        JobError: one of them makes no sense.
    """
    from unisono.study.analysis import Wanted
    from unisono.study.recommendation import Prices

    if not 0 < threshold <= 1:
        raise JobError(f"--efficiency {threshold}: above 0 and at most 1, such as 0.8")
    for name, value in (("--price", price or 0.0), ("--waiting", waiting)):
        if not 0 <= value < float("inf"):
            raise JobError(f"{name} {value}: a number from 0")
    prices = Prices(price or 0.0, waiting) if price is not None or waiting else None
    return Wanted(title=title, predict=_numbers(predict), threshold=threshold, prices=prices)


def report_from(source: Path, out: Path | None, wanted: Wanted) -> None:
    """Report on figures that were measured elsewhere: a CSV file, a results.json, or a study's folder.

    Args:
        source: where they are.
        out: the report's folder; None for a study's own, or one beside the file, with its name.
        wanted: by the reader.

    Raises:
        JobError: the figures cannot be read, or the report cannot be written.
    """
    from unisono.study.report import require_reports
    from unisono.study.table import read_results

    require_reports()
    results = read_results(source)
    folder = out or (source if source.is_dir() else source.with_name(f"{source.stem}-report"))
    conclude(results, folder, wanted, [source if source.is_dir() else source.parent])


def compare(sources: Sequence[Path], out: Path | None, wanted: Wanted) -> None:
    """Report on several studies in one table and one set of plots.

    Args:
        sources: studies' folders or results.
        out: the report's folder; None for ``comparison`` in the working directory.
        wanted: by the reader.

    Raises:
        JobError: there are fewer than two, they cannot be read, or the report cannot be written.
    """
    from unisono.study.report import require_reports
    from unisono.study.side_by_side import side_by_side
    from unisono.study.table import read_results

    if len(sources) < 2:
        raise JobError("unisono study compare A B: two studies are needed, each a folder, a results.json or a CSV file")
    require_reports()
    results = side_by_side([(_name(source), read_results(source)) for source in sources])
    conclude(results, out or Path("comparison"), wanted, [source for source in sources if source.is_dir()])


def conclude(results: Results, folder: Path, wanted: Wanted, batches_in: Sequence[Path] = ()) -> None:
    """Write the report, and print what it says.

    Args:
        results: what was measured.
        folder: of the report.
        wanted: by the reader.
        batches_in: folders in which the search for the largest batch may have left its figures.

    Raises:
        JobError: it cannot be written.
    """
    from unisono.study.batch_curve import read_batch_curve
    from unisono.study.report import write_report

    labels = list(dict.fromkeys(cell.label for cell in results.cells))
    several = len(batches_in) > 1
    found = {_name(place) if several else (labels or [""])[0]: read_batch_curve(place) for place in batches_in}
    report = write_report(results, folder, wanted, {label: one for label, one in found.items() if one is not None})
    out = Console(highlight=False, emoji=False)
    for words in report.verdict:
        out.print(Text(words, style="bold"), soft_wrap=True)
    for section in report.sections:
        for block in section.blocks:
            if section.title.startswith("Figures") and block.table is not None:
                out.print(_on_screen(section.title, block.table))
    for words in (*report.advice, *results.notes):
        out.print(Text(words), soft_wrap=True)
    out.print(Text(f"report: {folder / 'report.html'}, {folder / 'report.pdf'}"), soft_wrap=True)


def _on_screen(title: str, written: WrittenTable) -> Table:
    table = Table(title=title, box=None, title_justify="left", pad_edge=False)
    for place, name in enumerate(written.head):
        table.add_column(name, justify="left" if place < written.text_columns else "right")
    for row in written.rows:
        fields = (f"{field.text}\n({field.below})" if field.below else field.text for field in row)
        table.add_row(*(Text(field) for field in fields))
    return table


def _numbers(text: str | None) -> list[int]:
    try:
        found = sorted({int(part) for part in (text or "").split(",") if part.strip()})
    except ValueError:
        found = [0]
    if found and found[0] < 1:
        raise JobError(f"--predict {text}: numbers of workers with commas between them, such as 8,16")
    return found


def _name(source: Path) -> str:
    """Of a study: its folder's, or its file's."""
    path = source.absolute()
    if path.is_dir() or path.stem == "results":
        return path.name if path.is_dir() else path.parent.name
    return path.stem
