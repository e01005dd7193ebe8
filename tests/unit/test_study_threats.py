"""What speaks against figures, as far as they tell."""

import pytest

from studies import MadeUp
from unisono_lab.analysis.analysis import Wanted, analyzed
from unisono_lab.analysis.results import Cell, Mode, Results
from unisono_lab.report.verdict import threats

pytestmark = pytest.mark.unit


def said(results: Results) -> list[str]:
    return threats(analyzed(results, Wanted()))


def test_a_run_that_failed_is_counted_once_and_named_by_what_it_was() -> None:
    modes: tuple[Mode, ...] = ("baseline", "strong", "weak")
    bad = [Cell(mode=mode, workers=1, samples=0, seconds=0.0, exit_code=3) for mode in modes]
    bad.append(Cell(mode="weak", workers=2, samples=0, seconds=0.0, exit_code=4))
    good = [Cell(mode=mode, workers=1, repeat=1, samples=9, seconds=1.0, epoch=e) for mode in modes for e in (1, 2)]

    assert said(Results(cells=(*bad, *good)))[0] == (
        "3 of 5 runs failed and are in no figure: baseline (exit code 3); strong, 1 worker (exit code 3); "
        "weak, 2 workers (exit code 4)."
    )
    assert said(Results(cells=(bad[2], *good[4:])))[0].endswith("in no figure: weak, 1 worker (exit code 3).")


def test_a_plain_loop_with_a_single_epoch_is_cold() -> None:
    warm = MadeUp().results()
    cold = [cell.model_copy(update={"epoch": 1}) if cell.mode == "baseline" else cell for cell in warm.cells]
    words = "The plain loop was timed over a first epoch"

    assert any(words in each for each in said(Results(cells=tuple(cold))))
    assert not any(words in each for each in said(warm))


def test_in_weak_scaling_the_plain_loop_has_a_smaller_batch() -> None:
    words = "weak scaling: The plain loop has the batch of one worker"

    assert any(words in each for each in said(MadeUp(modes=("strong", "weak"), plain=(1, 2)).results()))
    assert not any(words in each for each in said(MadeUp(modes=("strong", "weak"), plain=(1,)).results()))
