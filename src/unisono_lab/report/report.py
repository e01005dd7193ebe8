"""All files of a report, in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from unisono.errors import JobError
from unisono_lab.analysis.analysis import Wanted, analyzed
from unisono_lab.analysis.batch_curve import BatchCurve
from unisono_lab.analysis.results import Results
from unisono_lab.report.charts import charts
from unisono_lab.report.document import Document, document
from unisono_lab.report.drawing import Chart, Drawing, drawn, inline
from unisono_lab.report.step_picture import step_charts

HTML_NAME, PDF_NAME = "report.html", "report.pdf"

NEEDED = ("matplotlib", "jinja2", "reportlab")


def require_reports() -> None:
    """Make sure that a report can be written, before anything is measured for it.

    Raises:
        JobError: something is not installed; says how to install it.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise JobError(f"a report needs {' and '.join(missing)}: pip install '.[study]' in a clone of Unisono")


def write_report(
    results: Results,
    folder: Path,
    wanted: Wanted,
    batches: Mapping[str, BatchCurve] | None = None,
    sources: Sequence[Path] = (),
) -> Document:
    """Write ``report.html``, ``report.pdf``, ``results.csv``, ``results.json``, and each plot as PNG and as SVG.

    Args:
        results: the measurements.
        folder: the report's folder, made if it is missing.
        wanted: the reader's choices.
        batches: the results of the search for the largest batch, by label.
        sources: the folders of the studies, of which single steps are shown.

    Returns:
        what the report says.

    Raises:
        JobError: something is not installed, or cannot be written.
    """
    require_reports()
    results.write(folder)
    analysis = analyzed(results, wanted, batches)
    pictures = [*charts(analysis), *step_charts(sources)]
    found = document(analysis, pictures)
    write_document(found, pictures, folder)
    return found


def write_document(found: Document, pictures: Sequence[Chart], folder: Path) -> None:
    """Write ``report.html``, ``report.pdf``, and each plot as PNG and as SVG.

    Args:
        found: the document.
        pictures: its plots.
        folder: the report's folder, made if it is missing.

    Raises:
        JobError: something is not installed, or cannot be written.
    """
    require_reports()
    from unisono_lab.report.pdf import pdf

    drawings = {chart.name: drawn(chart) for chart in pictures}
    plots = folder / "plots"
    try:
        plots.mkdir(parents=True, exist_ok=True)
        for name, drawing in drawings.items():
            (plots / f"{name}.png").write_bytes(drawing.png)
            (plots / f"{name}.svg").write_bytes(drawing.svg)
        _replace(folder / HTML_NAME, page(found, drawings).encode())
        _replace(folder / PDF_NAME, pdf(found, drawings))
    except OSError as error:
        raise JobError(f"the report cannot be written into {folder}: {error}") from error


def page(document: Document, drawings: Mapping[str, Drawing]) -> str:
    """The report as one HTML file that needs nothing else: no network, no script. Whatever labels hold is text.

    It is light or dark as the reader's screen is.

    Args:
        document: the document's content.
        drawings: the drawings of its charts, by their names.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    text = files(__package__).joinpath(HTML_NAME).read_text(encoding="utf-8")
    drawn = {name: Markup(inline(name, one)) for name, one in drawings.items()}  # noqa: S704 (matplotlib has escaped it)
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(text)
    return str(template.render(document=document, drawn=drawn))


def _replace(path: Path, data: bytes) -> None:
    """In one piece: a reader has the old one or the new one."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(data)
    beside.replace(path)
