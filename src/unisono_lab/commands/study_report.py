"""The last output of ``unisono study``: a summary of the report, and where the report is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.cli.tables import bare_table, show_table, width_of
from unisono.errors import JobError
from unisono_lab.report.document import Field, WrittenTable

if TYPE_CHECKING:
    from unisono_lab.analysis.analysis import Wanted
    from unisono_lab.analysis.batch_curve import BatchCurve
    from unisono_lab.analysis.results import Results
    from unisono_lab.report.document import Document, Section


FIGURES, CORRECTNESS = "Figures", "Correctness"
"""Sections of the report that are printed, too; how their titles begin."""

HIDDEN = ("study", "runs")
"""Columns that are not printed where all of their fields are alike."""

LEAST = ("runs", "serial share", "× plain loop", "epoch, s")
"""Columns that go where there is no room, first ones first."""

WITH_INTERVALS = ("samples/s", "speedup")


def report(results: Results, folder: Path, wanted: Wanted, sources: Sequence[Path] = ()) -> None:
    """Write the report of a study and print the most of it; without what a report needs, print alone.

    Args:
        results: the measurements.
        folder: the report's folder, made if it is missing.
        wanted: the reader's choices.
        sources: the folders of the studies, with their timelines and figures of the search for the largest batch; if
            there are none, the report's own folder.

    Raises:
        JobError: the folder cannot be written to.
    """
    from unisono_lab.analysis.analysis import analyzed
    from unisono_lab.analysis.results import CSV_NAME
    from unisono_lab.report.document import document
    from unisono_lab.report.report import HTML_NAME, require_reports, write_report

    out = Console(highlight=False, emoji=False)
    batches = _batches(results, sources or [folder])
    try:
        require_reports()
    except JobError as error:
        results.write(folder)
        show(document(analyzed(results, wanted, batches), ()), out)
        words = f"figures: {folder / CSV_NAME}; {error}, and then unisono study --from {folder}"
    else:
        show(write_report(results, folder, wanted, batches, sources or [folder]), out)
        words = f"report: {folder / HTML_NAME}"
    out.print(Text(words, "dim"), soft_wrap=True)


def _batches(results: Results, sources: Sequence[Path]) -> dict[str, BatchCurve]:
    """By label, as far as it is known which label a folder's search is about."""
    from unisono_lab.analysis.batch_curve import read_batch_curve

    labels = list(dict.fromkeys(cell.label for cell in results.cells))
    found = {}
    for place in sources:
        curve = read_batch_curve(place)
        if curve is not None:
            found[labels[0] if len(sources) == 1 and len(labels) == 1 else place.absolute().name] = curve
    return found


def show(found: Document, out: Console) -> None:
    """Print a report's verdict, its tables of figures, what it says of correctness, and its advice."""
    for words in found.verdict:
        out.print(Text(words, "bold"), soft_wrap=True)
    for section in found.sections:
        if section.title.startswith(FIGURES):
            _figures(section, out)
    for section in found.sections:
        if section.title.startswith(CORRECTNESS):
            for block in section.blocks:
                for words in block.texts:
                    out.print(Text(words), soft_wrap=True)
    for words in found.advice:
        out.print(Text(words, "bold"), soft_wrap=True)


def _figures(section: Section, out: Console) -> None:
    out.print()
    for block in section.blocks:
        if block.table is not None:
            show_table(_fitting(block.table, section.title, out), out)
    out.print()


def _fitting(written: WrittenTable, title: str, out: Console) -> Table:
    """Without columns that one can do without, if the terminal is narrow."""
    left = written
    for name in ("", *LEAST):
        left = left.with_columns([place for place, head in enumerate(left.head) if head != name])
        table = _table(left, title)
        if not out.is_terminal or width_of(table, out) <= out.width:
            break
    return table


def _table(written: WrittenTable, title: str) -> Table:
    """With the intervals of the most important columns."""
    places = [place for place, name in enumerate(written.head) if name not in HIDDEN or len(_words(written, place)) > 1]
    chosen = written.with_columns(places)
    rows = [[_printed(field, name) for field, name in zip(row, chosen.head, strict=True)] for row in chosen.rows]
    table = bare_table([name.replace(" ", "\n") for name in chosen.head], rows, range(chosen.text_columns))
    table.title, table.title_justify = title, "left"
    return table


def _printed(field: Field, name: str) -> Text:
    has_interval = field.below and name in WITH_INTERVALS
    return Text.assemble(field.text, (f"\n{field.below}", "dim")) if has_interval else Text(field.text)


def _words(written: WrittenTable, place: int) -> set[str]:
    return {row[place].text for row in written.rows}


# Reports of figures that are there already, and of several studies beside each other.


def report_from(source: Path, out: Path | None, wanted: Wanted) -> None:
    """Report on figures that are there already: a CSV file, a results.json, or a study's folder.

    Args:
        source: the file or folder with the figures.
        out: the report's folder; None for a study's own, or one beside the file: ``figures-report`` of figures.csv.
        wanted: the reader's choices.

    Raises:
        JobError: the figures cannot be read, or the report cannot be written.
    """
    from unisono_lab.analysis.results import CSV_NAME, read_results

    is_folder = source.is_dir()
    folder = out or (source if is_folder else source.with_name(f"{source.stem}-report"))
    if source.suffix.lower() == ".csv" and (folder / CSV_NAME).absolute() == source.absolute():
        raise JobError(f"the report's own {CSV_NAME} would take the place of {source}: name another folder with --out")
    own = source if is_folder else source.parent
    if folder.resolve() != own.resolve():
        _require_no_study(folder, [])
    report(read_results(source), folder, wanted, [own])


def compare(sources: Sequence[Path], out: Path | None, wanted: Wanted) -> None:
    """Report on several studies in one table and one set of plots.

    Args:
        sources: studies' folders or results.
        out: the report's folder; None for ``comparison`` in the working directory.
        wanted: the reader's choices.

    Raises:
        JobError: there are fewer than two, they cannot be read, or the report cannot be written.
    """
    from unisono_lab.analysis.results import read_results, side_by_side

    if len(sources) < 2:
        raise JobError("unisono study compare A B: name two studies, each a folder, a results.json or a CSV file")
    folder = out or Path("comparison")
    _require_no_study(folder, sources)
    results = side_by_side([(name_of(source), read_results(source)) for source in sources])
    report(results, folder, wanted, [source if source.is_dir() else source.parent for source in sources])


def _require_no_study(folder: Path, sources: Sequence[Path]) -> None:
    """Refuse to write a report over figures that are not its own.

    Args:
        folder: the report's folder.
        sources: the files and folders of the figures in it.

    Raises:
        JobError: it is a study's folder, or holds one of the sources.
    """
    from unisono_lab.analysis.results import CSV_NAME, JSON_NAME, SETTINGS_NAME

    taken = {(folder / name).resolve() for name in ("", CSV_NAME, JSON_NAME)}
    if (folder / SETTINGS_NAME).exists() or any(source.resolve() in taken for source in sources):
        raise JobError(f"the report would take the place of the results in {folder}: name another folder with --out")


def name_of(source: Path) -> str:
    """Of a study: its folder's, or its file's."""
    path = source.absolute()
    if path.is_dir() or path.stem == "results":
        return path.name if path.is_dir() else path.parent.name
    return path.stem
