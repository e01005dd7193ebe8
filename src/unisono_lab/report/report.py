"""All files of a report, in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.cli.display import bare_table, show_table, width_of
from unisono.errors import JobError
from unisono_lab.report.charts import charts, step_charts
from unisono_lab.report.document import Document, Field, WrittenTable, document
from unisono_lab.report.drawing import Chart, Drawing, drawn, inline, replace_file
from unisono_lab.study.analysis import ReportSettings, analyzed
from unisono_lab.study.results import (
    CSV_NAME,
    JSON_NAME,
    SETTINGS_NAME,
    BatchCurve,
    Results,
    read_batch_curve,
    read_results,
    side_by_side,
)

HTML_NAME = "report.html"

NEEDED = ("matplotlib", "jinja2")


def require_reports() -> None:
    """Check that a report can be written, before anything is measured.

    Raises:
        JobError: a package is not installed; the message says how to install it.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise JobError(f"a report needs {' and '.join(missing)}: pip install '.[study]' in a clone of Unisono")


def write_report(
    results: Results,
    folder: Path,
    settings: ReportSettings,
    batches: Mapping[str, BatchCurve] | None = None,
    sources: Sequence[Path] = (),
) -> Document:
    """Write ``report.html``, ``results.csv``, ``results.json``, and each plot as PNG and as SVG.

    The folder is made if it is missing. The timelines of the ``sources`` are charted. The content is returned.

    Raises:
        JobError: a package is not installed, or a file cannot be written.
    """
    require_reports()
    results.write(folder)
    analysis = analyzed(results, settings, batches)
    pictures = [*charts(analysis), *step_charts(sources)]
    content = document(analysis, pictures)
    write_document(content, pictures, folder)
    return content


def write_document(document: Document, pictures: Sequence[Chart], folder: Path) -> None:
    """Write ``report.html``, and each plot as PNG and as SVG, into a folder that is made if missing.

    Raises:
        JobError: a package is not installed, or a file cannot be written.
    """
    require_reports()
    drawings = {chart.name: drawn(chart) for chart in pictures}
    plots = folder / "plots"
    try:
        plots.mkdir(parents=True, exist_ok=True)
        for name, drawing in drawings.items():
            (plots / f"{name}.png").write_bytes(drawing.png)
            (plots / f"{name}.svg").write_bytes(drawing.svg)
        replace_file(folder / HTML_NAME, page(document, drawings).encode())
    except OSError as error:
        raise JobError(f"the report cannot be written into {folder}: {error}") from error


def page(document: Document, drawings: Mapping[str, Drawing]) -> str:
    """The report as one HTML file without network access or scripts; markup in labels is escaped.

    It follows the reader's preference for light or dark colours.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    text = files(__package__).joinpath(HTML_NAME).read_text(encoding="utf-8")
    inlined = {name: Markup(inline(name, drawing)) for name, drawing in drawings.items()}  # noqa: S704 (matplotlib has escaped it)
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(text)
    return str(template.render(document=document, drawn=inlined))


FIGURES, CORRECTNESS = "Figures", "Correctness"
"""The beginnings of the titles of the sections that are printed, too."""

HIDDEN = ("study", "runs")
"""Columns that are not printed if all their fields are equal."""

LEAST = ("runs", "serial share", "× plain loop", "epoch, s")
"""Columns that are left out on a narrow terminal, in this order."""

WITH_INTERVALS = ("samples/s", "speedup")


def report(results: Results, folder: Path, settings: ReportSettings, sources: Sequence[Path] = ()) -> None:
    """Write the report of a study, and print its main parts; print only if packages for the report are missing.

    The folder is made if it is missing. Timelines and batch sizes are those of ``sources``, or else of the folder
    itself.

    Raises:
        JobError: the folder cannot be written to.
    """
    out = Console(highlight=False, emoji=False)
    sources = sources or [folder]
    batches = _batches(results, sources)
    try:
        require_reports()
    except JobError as error:
        results.write(folder)
        show(document(analyzed(results, settings, batches), ()), out)
        words = f"figures: {folder / CSV_NAME}; {error}, and then run unisono study --from {folder}"
    else:
        show(write_report(results, folder, settings, batches, sources), out)
        words = f"report: {folder / HTML_NAME}"
    out.print(Text(words, "dim"), soft_wrap=True)


def _batches(results: Results, sources: Sequence[Path]) -> dict[str, BatchCurve]:
    """The searches by label; by the folder's name if it is not known which label the search is about."""
    labels = list(dict.fromkeys(cell.label for cell in results.cells))
    is_of_one = len(sources) == 1 and len(labels) == 1
    return {
        labels[0] if is_of_one else place.absolute().name: curve
        for place in sources
        if (curve := read_batch_curve(place)) is not None
    }


def show(document: Document, out: Console) -> None:
    """Print a report's verdict, its tables of figures, its sentences about correctness, and its advice."""
    for words in document.verdict:
        out.print(Text(words, "bold"), soft_wrap=True)
    for section in document.sections:
        if section.title.startswith(FIGURES):
            out.print()
            for block in section.blocks:
                if block.table is not None:
                    show_table(_fitting(block.table, section.title, out), out)
            out.print()
    correctness = [section for section in document.sections if section.title.startswith(CORRECTNESS)]
    for words in (words for section in correctness for block in section.blocks for words in block.texts):
        out.print(Text(words), soft_wrap=True)
    for words in document.advice:
        out.print(Text(words, "bold"), soft_wrap=True)


def _fitting(written: WrittenTable, title: str, out: Console) -> Table:
    """The table for the terminal; if it is narrow, less important columns are left out."""
    narrowed = written
    for name in ("", *LEAST):
        narrowed = narrowed.with_columns([place for place, head in enumerate(narrowed.head) if head != name])
        table = _table(narrowed, title)
        if not out.is_terminal or width_of(table, out) <= out.width:
            break
    return table


def _table(written: WrittenTable, title: str) -> Table:
    """The table for the terminal, with intervals in the most important columns."""
    texts = [{row[place].text for row in written.rows} for place in range(len(written.head))]
    places = [place for place, name in enumerate(written.head) if name not in HIDDEN or len(texts[place]) > 1]
    chosen = written.with_columns(places)
    rows = [[_printed(field, name) for field, name in zip(row, chosen.head, strict=True)] for row in chosen.rows]
    table = bare_table([name.replace(" ", "\n") for name in chosen.head], rows, range(chosen.text_columns))
    table.title, table.title_justify = title, "left"
    return table


def _printed(field: Field, name: str) -> Text:
    has_interval = field.below and name in WITH_INTERVALS
    return Text.assemble(field.text, (f"\n{field.below}", "dim")) if has_interval else Text(field.text)


# Reports of earlier figures, and of several studies side by side.


def report_from(source: Path, out: Path | None, settings: ReportSettings) -> None:
    """Report earlier figures from a CSV file, a results.json, or a study's folder.

    Without ``out`` it is written into the study's own folder, or beside the file: ``figures-report`` for
    ``figures.csv``.

    Raises:
        JobError: the figures cannot be read, or the report cannot be written.
    """
    own = source if source.is_dir() else source.parent
    folder = out or (source if source.is_dir() else source.with_name(f"{source.stem}-report"))
    if source.suffix.lower() == ".csv" and (folder / CSV_NAME).absolute() == source.absolute():
        raise JobError(f"the report's {CSV_NAME} would replace {source}: name another folder with --out")
    if folder.resolve() != own.resolve():
        _require_no_study(folder, [])
    report(read_results(source), folder, settings, [own])


def compare(sources: Sequence[Path], out: Path | None, settings: ReportSettings) -> None:
    """Report on several studies in one table and one set of plots; None for ``comparison`` in the working directory.

    Raises:
        JobError: there are fewer than two studies, one cannot be read, or the report cannot be written.
    """
    if len(sources) < 2:
        raise JobError("unisono study compare A B: name two studies or more, each a folder, results.json or a CSV file")
    folder = out or Path("comparison")
    _require_no_study(folder, sources)
    results = side_by_side([(name_of(source), read_results(source)) for source in sources])
    report(results, folder, settings, [source if source.is_dir() else source.parent for source in sources])


def _require_no_study(folder: Path, sources: Sequence[Path]) -> None:
    """Refuse to write a report over the figures of a study or of a source.

    Raises:
        JobError: the folder holds such figures, which would be lost.
    """
    taken = {(folder / name).resolve() for name in ("", CSV_NAME, JSON_NAME)}
    if (folder / SETTINGS_NAME).exists() or any(source.resolve() in taken for source in sources):
        raise JobError(f"the report would replace the results in {folder}: name another folder with --out")


def name_of(source: Path) -> str:
    """The name of a study: that of its folder or its file."""
    path = source.absolute()
    if path.is_dir() or path.stem == "results":
        return path.name if path.is_dir() else path.parent.name
    return path.stem
