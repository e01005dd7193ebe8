"""The output of ``unisono batch-size``, and the file that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.cli.tables import show_table
from unisono.errors import JobError
from unisono_lab.analysis.estimate import number, percent
from unisono_lab.commands.study_options import STUDIES

if TYPE_CHECKING:
    from unisono_lab.analysis.batch_curve import BatchCurve, Tried
    from unisono_lab.measure.batch_search import Found
    from unisono_lab.measure.batch_searching import Searched

ENDS = {
    "memory": "more do not fit into memory",
    "data": "the data set has no more for a step",
    "most": "more were not to be tried",
}


def file_of(wanted: Path | None, stem: str) -> Path:
    """Where the figures go: by default into the folder of the script's study.

    Raises:
        JobError: it cannot be written.
    """
    from unisono_lab.analysis.batch_curve import NAME

    path = wanted or STUDIES / stem / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()  # nobody waits for an answer that cannot be kept
        if path.stat().st_size == 0:
            path.unlink()
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error}; name another file with --json") from error
    return path


def line(tried: Tried) -> str:
    """What came of a trial, in a line."""
    if not tried.fits:
        return f"batch {tried.batch}: does not fit: {tried.words}"
    memory = "" if tried.peak_mib is None else f", {number(tried.peak_mib)} MiB"
    speed = "" if tried.samples_per_s is None else f", {number(tried.samples_per_s)} samples/s"
    return f"batch {tried.batch}: fits{memory}{speed}"


def report(searched: Searched, curve: BatchCurve, path: Path) -> None:
    """Print the answer and what was tried, and write both into a file.

    Args:
        searched: the search.
        curve: the search's results, as they are kept.
        path: the file to write.

    Raises:
        JobError: it cannot be written.
    """
    from unisono.checkpoint.folder import write_json

    out = Console(highlight=False, emoji=False)
    out.print()
    show_table(_table(curve), out)
    out.print()
    for words in answer(searched, curve):
        out.print(Text(words, "bold"), soft_wrap=True)
    try:
        write_json(path, curve.model_dump(mode="json"))
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error}; name another file with --json") from error
    out.print(Text(f"figures: {path}", "dim"), soft_wrap=True)


def answer(searched: Searched, curve: BatchCurve) -> list[str]:
    """The answer in sentences."""
    found, trials = searched.found, searched.trials
    limit = "" if curve.memory_limit_mib is None else f" (limit: {curve.memory_limit_mib:.0f} MiB of the host's memory)"
    if found.largest is None:
        smallest = min(trials)
        return [f"no batch fits, not even {_batch(smallest, curve.workers)}{limit}: {trials[smallest].words}"]
    ends = ENDS[found.bound] + (limit if found.bound == "memory" else "")
    said = [f"largest batch that fits: {_batch(found.largest, curve.workers)}; {ends}"]
    if found.with_margin is not None and found.with_margin != found.largest:
        said.append(f"with a margin of {percent(curve.margin)}: {_batch(found.with_margin, curve.workers)}")
    return [*said, *_fastest(found, searched, curve.workers)]


def _fastest(found: Found, searched: Searched, workers: int) -> list[str]:
    if found.best is None:
        return ["no trial was long enough to be timed: the script takes too few steps"]
    best = searched.trials[found.best]
    return [
        f"best throughput: {_batch(found.best, workers)}, {number(best.samples_per_s)} samples/s",
        f"so take unisono.init(batch_size={found.best * workers}) with {workers} worker{'s' if workers > 1 else ''}",
    ]


def _batch(batch: int, workers: int) -> str:
    return f"{batch}" if workers == 1 else f"{batch} per worker, {batch * workers} in all"


def _table(curve: BatchCurve) -> Table:
    marks = (("largest", curve.largest), ("with margin", curve.with_margin), ("best throughput", curve.best))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("batch per worker" if curve.workers > 1 else "batch", "samples/s", "peak MiB", "fits"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for one in curve.rows:
        names = [name for name, batch in marks if batch == one.batch]
        fields = [str(one.batch), number(one.samples_per_s), number(one.peak_mib), "yes" if one.fits else "no"]
        table.add_row(*map(Text, fields), Text(", ".join(names)))
    return table
