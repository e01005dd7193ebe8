"""Whether ``unisono batch-size`` finds what a fine scan finds: ``python -m benchmarks.batch_scan``.

Trials are noisy near the limit, so the scan has two ends: up to where every batch fitted, and the last one that did.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unisono.launch.local import Launcher
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.tuning import Tuning
from unisono_lab.commands.batch_size import read_mib
from unisono_lab.study.batch_search import BatchRunner, BatchSearch, searched

PROGRAM = Path(__file__).parent / "programs" / "convolutions.py"
LARGE = "65536"
"""Bytes of a block from which on glibc maps it by itself, if it is told a number."""

SHARDS = 2
"""That the program has."""

BELOW, ABOVE = 0.8, 1.2
"""Of what the search found: where the scan begins and ends."""

SHARE = 0.02
"""Of what the search found: from one batch of the scan to the next."""


@dataclass(frozen=True, slots=True)
class Scan:
    """A fine scan.

    Attributes:
        fits: by batch, smallest first.
    """

    fits: dict[int, bool]

    @property
    def all_fit(self) -> int:
        """The largest batch up to which every one fitted."""
        failed = next((batch for batch, fits in self.fits.items() if not fits), max(self.fits) + 1)
        return max((batch for batch in self.fits if batch < failed), default=0)

    @property
    def last(self) -> int:
        """The largest that fitted."""
        return max((batch for batch, fits in self.fits.items() if fits), default=0)


def compared(workers: int, limit: str, steps: int, folder: Path) -> str:
    """A search and a scan with so many workers, in a line."""
    settings = LaunchSettings(
        Script(str(PROGRAM)),
        workers=workers,
        tuning=Tuning.of_this_process(),
        memory_limit_mib=read_mib(limit),
    )
    runner = BatchRunner(settings, steps, folder / "failed")
    with Launcher(share=True) as launcher:
        whole = searched(BatchSearch(workers), lambda batch: runner.attempt(batch, launcher, folder), _tell)
        found = whole.largest
        if found is None:
            return f"{workers} workers: no batch fits"
        unit = max(SHARDS // workers, 1)
        begin, stride = (max(int(share * found) // unit * unit, unit) for share in (BELOW, SHARE))
        to_scan = range(begin, int(ABOVE * found), stride)
        scan = Scan({batch: _fits(runner, batch, launcher, folder) for batch in to_scan})
    return (
        f"{workers} worker{'s' if workers > 1 else ''}: found {found} in {len(whole.rows)} trials; in a scan of "
        f"{len(scan.fits)} every batch fitted up to {scan.all_fit}, and the last that did was {scan.last}"
    )


def _fits(runner: BatchRunner, batch: int, launcher: Launcher, folder: Path) -> bool:
    tried = runner.attempt(batch, launcher, folder)
    _tell(tried)
    return tried.fits


def _tell(tried: object) -> None:
    print(tried, file=sys.stderr)


def main(
    workers: Annotated[str, typer.Option(help="numbers of workers, with commas")] = "1,2",
    memory_limit: Annotated[str, typer.Option(help="of each worker")] = "500MiB",
    steps: Annotated[int, typer.Option(help="of each trial")] = 10,
    exact_allocator: Annotated[bool, typer.Option(help="each large block is given back: memory without noise")] = False,
) -> None:
    """Search and scan with each number of workers."""
    if exact_allocator:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = LARGE
    with tempfile.TemporaryDirectory() as folder:
        for number in workers.split(","):
            print(compared(int(number), memory_limit, steps, Path(folder)), flush=True)


if __name__ == "__main__":
    typer.run(main)
