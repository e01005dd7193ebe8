"""What a benchmark leaves: a table on the screen, JSON for programs, a plot."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.noise import Noise
from unisono.cli.display import show_table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Grid:
    """One table: what it shows, its columns, its rows, and what a reader should know."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """One benchmark's results.

    Attributes:
        name: of the benchmark, and of its files.
        settings: how it was run.
        noise: how calm the machine was.
        grids: for people.
        figures: the same for programs, and more: JSON.
        failures: what could not be measured.
        draw: draws a plot into a matplotlib figure.
    """

    name: str
    settings: dict[str, Any]
    noise: Noise
    grids: Sequence[Grid]
    figures: dict[str, Any]
    failures: Sequence[str] = ()
    draw: Callable[[Any], None] | None = None

    def publish(self, folder: Path) -> None:
        """Print it, and write ``NAME.json`` and ``NAME.png`` into a folder."""
        screen = Console(width=None if Console().is_terminal else 160, highlight=False)
        for grid in self.grids:
            _show(grid, screen)
        screen.print(str(self.noise), markup=False)
        folder.mkdir(parents=True, exist_ok=True)
        written = [self._write_json(folder), *self._write_plot(folder)]
        screen.print(f"Written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)

    def _write_json(self, folder: Path) -> Path:
        path = folder / f"{self.name}.json"
        noise = asdict(self.noise) | {"spread": self.noise.spread, "is_calm": self.noise.is_calm}
        about = {"benchmark": self.name, "settings": self.settings, "machine": machine(), "noise": noise}
        path.write_text(json.dumps(about | self.figures, indent=2))
        return path

    def _write_plot(self, folder: Path) -> list[Path]:
        if self.draw is None:
            return []
        if find_spec("matplotlib") is None:
            print("No plot: matplotlib is not installed (pip install matplotlib)")
            return []
        from matplotlib.figure import Figure

        path = folder / f"{self.name}.png"
        figure = Figure(layout="constrained")
        self.draw(figure)
        figure.savefig(path, dpi=120)
        return [path]


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _show(grid: Grid, screen: Console) -> None:
    table = Table(box=box.MARKDOWN)
    for number, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in grid.rows:
        table.add_row(*row)
    screen.print(grid.title, style="bold", markup=False)
    show_table(table, screen)
    for note in grid.notes:
        screen.print(note, markup=False)
    screen.print()
