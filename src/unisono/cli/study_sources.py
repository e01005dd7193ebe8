"""Reports of figures that are there already, and of several studies beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli.study_report import report
from unisono.errors import JobError

if TYPE_CHECKING:
    from unisono.study.analysis.analysis import Wanted


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
    from unisono.study.analysis.analysis import Wanted
    from unisono.study.analysis.recommendation import Prices

    if not 0 < threshold <= 1:
        raise JobError(f"--efficiency {threshold}: above 0 and at most 1, such as 0.8")
    for name, value in (("--price", price or 0.0), ("--waiting", waiting)):
        if not 0 <= value < float("inf"):
            raise JobError(f"{name} {value}: a number from 0")
    prices = Prices(price or 0.0, waiting) if price is not None or waiting else None
    return Wanted(title=title, predict=_numbers(predict), threshold=threshold, prices=prices)


def report_from(source: Path, out: Path | None, wanted: Wanted) -> None:
    """Report on figures that are there already: a CSV file, a results.json, or a study's folder.

    Args:
        source: where they are.
        out: the report's folder; None for a study's own, or one beside the file: ``figures-report`` of figures.csv.
        wanted: by the reader.

    Raises:
        JobError: the figures cannot be read, or the report cannot be written.
    """
    from unisono.study.analysis.results import CSV_NAME
    from unisono.study.analysis.table import read_results

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
        wanted: by the reader.

    Raises:
        JobError: there are fewer than two, they cannot be read, or the report cannot be written.
    """
    from unisono.study.analysis.side_by_side import side_by_side
    from unisono.study.analysis.table import read_results

    if len(sources) < 2:
        raise JobError("unisono study compare A B: name two studies, each a folder, a results.json or a CSV file")
    folder = out or Path("comparison")
    _require_no_study(folder, sources)
    results = side_by_side([(name_of(source), read_results(source)) for source in sources])
    report(results, folder, wanted, [source if source.is_dir() else source.parent for source in sources])


def _require_no_study(folder: Path, sources: Sequence[Path]) -> None:
    """Refuse to write a report over figures that are not its own.

    Args:
        folder: of the report.
        sources: that it is made of.

    Raises:
        JobError: it is a study's folder, or holds one of the sources.
    """
    from unisono.study.analysis.results import CSV_NAME, JSON_NAME
    from unisono.study.analysis.study_folder import SETTINGS_NAME

    taken = {(folder / name).resolve() for name in ("", CSV_NAME, JSON_NAME)}
    if (folder / SETTINGS_NAME).exists() or any(source.resolve() in taken for source in sources):
        raise JobError(f"the report would take the place of the results in {folder}: name another folder with --out")


def _numbers(text: str | None) -> list[int]:
    try:
        found = sorted({int(part) for part in (text or "").split(",") if part.strip()})
    except ValueError:
        found = [0]
    if found and found[0] < 1:
        raise JobError(f"--predict {text}: numbers of workers with commas between them, such as 8,16")
    return found


def name_of(source: Path) -> str:
    """Of a study: its folder's, or its file's."""
    path = source.absolute()
    if path.is_dir() or path.stem == "results":
        return path.name if path.is_dir() else path.parent.name
    return path.stem
