"""Measuring what is missing, whatever happened to the study before."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from measured import line, write
from unisono.errors import JobError
from unisono_lab.study.measured_run import MeasuredRun
from unisono_lab.study.measuring import (
    Interrupted,
    Measured,
    Measurement,
    RunEnd,
    measure,
    network,
    notes,
    rows,
)
from unisono_lab.study.study_folder import Kind, PlannedCell, StudyFolder

pytestmark = pytest.mark.unit

STUDY = Measurement(("train.py",), workers=(1, 2), repeats=2, warmup_steps=0)
SETTINGS = {"script": ["train.py"], "steps": 3}


class Launcher:
    """Runs cells that take no time, and some that go wrong."""

    def __init__(self, *ends: RunEnd | BaseException, digest: str = "ab") -> None:
        self.ran: list[PlannedCell] = []
        self._ends = list(ends)
        self._digest = digest

    def __call__(self, cell: PlannedCell, place: Path) -> RunEnd:
        assert list(place.iterdir()) == []
        self.ran.append(cell)
        write(place, [line(step) for step in range(3)], weights_sha256=self._digest)
        (place / "checkpoints").mkdir()
        end = self._ends.pop(0) if self._ends else RunEnd(0)
        if isinstance(end, BaseException):
            raise end
        return end


def study(
    path: Path,
    launcher: Launcher,
    measurement: Measurement = STUDY,
    told: Callable[[str], None] = lambda words: None,
    *,
    keeps_going: bool = False,
) -> Measured:
    folder = StudyFolder(path)
    with folder.opened(SETTINGS):
        return measure(measurement, folder, launcher, told, keeps_going=keeps_going)


def test_every_cell_is_run_in_its_order_and_its_figures_are_kept(tmp_path: Path) -> None:
    launcher, told = Launcher(), list[str]()
    measured = study(tmp_path / "s", launcher, told=told.append)
    assert launcher.ran == list(measured.runs) == STUDY.cells
    assert told[2:4] == [f"run 2 of 4: {STUDY.cells[1]}", f"{STUDY.cells[1]}: 10 samples/s"]
    assert not list((tmp_path / "s").rglob("checkpoints"))


@pytest.mark.parametrize("killed_at", range(4))
def test_a_study_that_was_killed_in_a_run_measures_what_is_missing_and_nothing_twice(
    killed_at: int, tmp_path: Path
) -> None:
    first = Launcher(*[RunEnd(0)] * killed_at, SystemExit(9))
    with pytest.raises(SystemExit):
        study(tmp_path / "s", first)
    second = Launcher()
    measured = study(tmp_path / "s", second)
    assert second.ran == STUDY.cells[killed_at:]
    assert list(measured.runs) == STUDY.cells
    third = Launcher()
    assert list(study(tmp_path / "s", third).runs) == STUDY.cells
    assert third.ran == []


def test_more_repeats_and_other_workers_are_added_to_what_is_there(tmp_path: Path) -> None:
    study(tmp_path / "s", Launcher())
    larger = Measurement(("train.py",), workers=(1, 2, 4), repeats=3, warmup_steps=0)
    launcher = Launcher()
    measured = study(tmp_path / "s", launcher, larger)
    assert len(launcher.ran) == 5
    assert set(measured.runs) == set(larger.cells)


def test_a_run_that_fails_is_named_with_its_log_and_the_others_go_on(tmp_path: Path) -> None:
    told = list[str]()
    measured = study(
        tmp_path / "s", Launcher(RunEnd(0), RunEnd(3, "rank 1 failed", "logs/rank-1.log")), told=told.append
    )
    (missing,) = measured.missing
    assert (missing.cell, missing.exit_code, missing.words) == (STUDY.cells[1], 3, "rank 1 failed")
    assert missing.log.parent.parent.is_dir()
    assert missing.log.name == "rank-1.log"
    assert told[3] == f"{STUDY.cells[1]}: FAILED: rank 1 failed (log: {missing.log})"
    assert len(measured.runs) == 3
    (failed,) = (cell for cell in rows(STUDY, measured, cores=2) if not cell.succeeded)
    assert (failed.workers, failed.repeat, failed.exit_code) == (missing.cell.kind.workers, missing.cell.repeat, 3)
    again = Launcher()
    assert study(tmp_path / "s", again).missing == []
    assert again.ran == [STUDY.cells[1]]
    assert not list((tmp_path / "s" / "cells").glob("*.failed"))


def missing_module(rank: int) -> RunEnd:
    words = "ModuleNotFoundError: No module named 'absent'"
    return RunEnd(1, f"rank {rank} on host a failed with exit code 1: {words}", reason=words)


def test_a_study_ends_when_the_first_run_of_every_kind_has_failed_for_the_same_reason(tmp_path: Path) -> None:
    launcher = Launcher(missing_module(0), missing_module(1), *3 * [missing_module(0)])
    measured = study(tmp_path / "s", launcher)
    assert launcher.ran == [each.cell for each in measured.missing] == STUDY.cells[:2]
    assert measured.left_out == STUDY.cells[2:]


def test_a_study_of_one_kind_ends_when_its_failure_repeats(tmp_path: Path) -> None:
    one = Measurement(("train.py",), workers=(2,), repeats=5, warmup_steps=0)
    launcher = Launcher(*[missing_module(0)] * 5)
    assert study(tmp_path / "s", launcher, one).left_out == one.cells[2:]


@pytest.mark.parametrize(
    "ends",
    [
        [missing_module(0), RunEnd(137, "rank 1 was killed by SIGKILL"), missing_module(0), missing_module(1)],
        [RunEnd(0), missing_module(0), missing_module(0), missing_module(1)],
    ],
    ids=["for other reasons", "after a run that could be measured"],
)
def test_a_study_goes_on_after_failures(ends: list[RunEnd], tmp_path: Path) -> None:
    launcher = Launcher(*ends)
    assert study(tmp_path / "s", launcher).left_out == []
    assert launcher.ran == STUDY.cells


def test_a_study_that_was_told_to_go_on_does_so(tmp_path: Path) -> None:
    launcher = Launcher(*[missing_module(0)] * 4)
    measured = study(tmp_path / "s", launcher, keeps_going=True)
    assert (len(measured.missing), measured.left_out) == (4, [])


def test_what_was_measured_before_gives_hope(tmp_path: Path) -> None:
    study(tmp_path / "s", Launcher(RunEnd(0), *[missing_module(0)] * 3))
    launcher = Launcher(*[missing_module(0)] * 3)
    assert study(tmp_path / "s", launcher).left_out == []


def test_a_run_of_which_nothing_can_be_timed_is_missing_too(tmp_path: Path) -> None:
    measurement = Measurement(("train.py",), workers=(1,), repeats=1, warmup_steps=3)
    (missing,) = study(tmp_path / "s", Launcher(), measurement).missing
    assert missing.exit_code == 1
    assert "nothing to time" in missing.words


def test_an_interrupted_study_keeps_what_it_has_and_drops_the_run_that_was_under_way(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        study(tmp_path / "s", Launcher(RunEnd(0), RunEnd(130, interrupted=signal.SIGINT)))
    assert [one.name for one in (tmp_path / "s" / "cells").iterdir()] == [STUDY.cells[0].name]


def test_a_folder_with_figures_of_another_study_is_refused_and_told_apart(tmp_path: Path) -> None:
    study(tmp_path / "s", Launcher())
    with (
        pytest.raises(JobError, match=r"steps: 9 here, 3 there\. Use another --out"),
        StudyFolder(tmp_path / "s").opened(SETTINGS | {"steps": 9}),
    ):
        pass


def test_a_folder_that_is_no_studys_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(JobError, match="no study's folder: it holds thesis.tex"), StudyFolder(tmp_path).opened({}):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_search_for_the_largest_batch_may_have_come_first(tmp_path: Path) -> None:
    (tmp_path / "batch-size.json").write_text("{}")
    assert len(study(tmp_path, Launcher()).runs) == 4


def test_two_studies_do_not_measure_in_one_folder_at_a_time(tmp_path: Path) -> None:
    first, second = StudyFolder(tmp_path / "s"), StudyFolder(tmp_path / "s")
    with first.opened(SETTINGS), pytest.raises(JobError, match="another study measures"), second.opened(SETTINGS):
        pass
    with second.opened(SETTINGS):
        pass


def test_one_worker_stands_in_both_tables_and_losses_are_compared_after_the_samples_of_the_shortest(
    tmp_path: Path,
) -> None:
    both = Measurement(("train.py",), workers=(1, 2), modes=("strong", "weak"), repeats=1)

    def run(samples: int) -> MeasuredRun:
        return MeasuredRun(1, 1.0, samples, losses=[(at - 10, at, float(at)) for at in range(10, samples + 1, 10)])

    trained = {Kind("strong", 1): 100, Kind("strong", 2): 100, Kind("weak", 2): 200}
    cells = rows(both, Measured({cell: run(trained[cell.kind]) for cell in both.cells}), cores=2)
    assert sorted((cell.mode, cell.workers, cell.loss) for cell in cells) == [
        ("strong", 1, 100.0),
        ("strong", 2, 100.0),
        ("weak", 1, 100.0),
        ("weak", 2, 100.0),
    ]


def with_threads(threads: int, measurement: Measurement) -> Measured:
    """What comes of a study whose script sets the threads of its workers."""
    return Measured(
        {
            cell: MeasuredRun(1, 1.0, 1, threads=1 if cell.kind.mode == "baseline" else threads)
            for cell in measurement.cells
        }
    )


@pytest.mark.parametrize(
    ("given", "own", "plain"),
    [(None, 1, [1, 2, 4]), (2, 2, [1, 2, 4]), (None, 2, [1, 2]), (None, 8, []), (2, 1, [2, 4, 8])],
)
def test_a_plain_loop_stands_for_the_workers_that_really_have_its_threads(
    given: int | None, own: int, plain: list[int]
) -> None:
    workers = (1, 2, 4)
    study = Measurement(
        ("train.py",), workers, repeats=1, baseline=("plain.py",), baseline_workers=workers, threads=given
    )
    measured = with_threads(own, study)
    cells = rows(study, measured, cores=8)
    assert sorted(cell.workers for cell in cells if cell.mode == "baseline") == plain
    assert sorted(cell.workers for cell in cells if cell.mode == "strong") == [1, 2, 4]
    said = [words for words in notes(study, measured) if f"The script sets threads={own} itself" in words]
    assert len(said) == (own != (given or 1))


def test_what_lies_between_workers_is_the_median_between_the_fewest() -> None:
    def run(latency: float | None) -> MeasuredRun:
        return MeasuredRun(1, 1.0, 1, reduction=None if latency is None else {"latency_s": latency})

    found = {PlannedCell(Kind("strong", 2), number): run(each) for number, each in enumerate((1.0, 2.0, 9.0))}
    found |= {PlannedCell(Kind("strong", 4), 0): run(5.0), PlannedCell(Kind("strong", 1), 0): run(None)}
    assert network(Measured(found)) == {"latency_s": 2.0}
    assert network(Measured()) == {}
