"""What a study shows while it measures."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from unisono_lab.analysis.study_folder import Kind, PlannedCell
from unisono_lab.commands.study_progress import StudyProgress, roughly
from unisono_lab.measure.measured_run import MeasuredRun
from unisono_lab.measure.measuring import Missing

pytestmark = pytest.mark.unit

CELLS = [PlannedCell(Kind("strong", workers), 0) for workers in (1, 2)]


def show(*, is_terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=120, color_system=None, highlight=False)
    with StudyProgress(3, done=1, console=console) as progress:
        with progress.running(CELLS[0], None):
            pass
        progress.measured(CELLS[0], MeasuredRun(100, 2.0, 100, epoch_s=4.0))
        with progress.running(CELLS[1], 300.0):
            progress._bar.refresh()
        progress.failed(Missing(CELLS[1], 3, "rank 1 failed", Path("the.log")))
    return output.getvalue()


def test_without_a_terminal_there_are_lines_with_the_time_that_is_left() -> None:
    assert show(is_terminal=False).splitlines() == [
        "run 2 of 3: strong, 1 worker, repeat 1",
        "strong, 1 worker, repeat 1: 50 samples/s, 4 s per epoch",
        "run 3 of 3: strong, 2 workers, repeat 1, 5 min left",
        "strong, 2 workers, repeat 1: FAILED: rank 1 failed (log: the.log)",
    ]


def test_in_a_terminal_there_is_a_bar_that_counts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # or rich takes it for one that cannot move its cursor
    shown = show(is_terminal=True)
    assert "2/3" in shown
    assert "strong, 2 workers, repeat 1" in shown
    assert "5 min left" in shown
    assert "run 3 of 3" not in shown


@pytest.mark.parametrize(
    ("seconds", "words"), [(40.4, "40 s"), (119.0, "119 s"), (720.0, "12 min"), (12000.0, "3 h 20 min")]
)
def test_durations_are_for_people(seconds: float, words: str) -> None:
    assert roughly(seconds) == words
