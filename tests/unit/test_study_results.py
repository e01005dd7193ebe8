"""Measured runs, the tables they are read from, and what repeated ones come to."""

import json
import math
import random
from pathlib import Path

import pytest

from studies import MadeUp
from unisono.errors import JobError
from unisono_lab.study.analysis import MODES, Row, summarized
from unisono_lab.study.estimate import Estimate, median, ratio
from unisono_lab.study.results import SHOWN, Cell, Results, read_results, read_table, side_by_side

pytestmark = pytest.mark.unit

PUBLISHED = "workers,epoch_s,images\n1,45,50000\n2,24,50000\n4,12,50000\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


def rows(results: Results, mode: str = "strong") -> list[Row]:
    return [row for (kind, _), found in summarized(results).items() if kind == mode for row in found]


def refused(path: Path) -> list[str]:
    with pytest.raises(JobError) as error:
        read_table(path)
    return str(error.value).splitlines()


# --- the files


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    results = MadeUp(labels=('a,\n"b"', "größer"), modes=("strong", "weak")).results()
    results.write(tmp_path)

    assert read_results(tmp_path) == results
    assert read_results(tmp_path / "results.csv").cells == results.cells


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    Results(cells=(Cell(workers=1, samples=1, seconds=1.0),)).write(tmp_path)
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))

    with pytest.raises(JobError, match="version"):
        read_results(path)


def test_a_loss_that_is_no_number_is_none(tmp_path: Path) -> None:
    cell = Cell(workers=1, samples=1, seconds=1.0, loss=math.nan)
    Results(cells=(cell,)).write(tmp_path)

    assert json.loads((tmp_path / "results.json").read_text())["cells"][0]["loss"] is None
    assert read_results(tmp_path).cells == (cell,)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no results\.json"):
        read_results(tmp_path)
    (tmp_path / "study.json").touch()
    with pytest.raises(JobError, match=r"is not over: start it again.*; with fewer --repeats"):
        read_results(tmp_path)


# --- tables from elsewhere


def test_the_published_run_yields_its_published_throughputs_and_speedups(table: Path) -> None:
    table.write_text(PUBLISHED)

    found = rows(read_table(table))

    assert [f"{row.samples_per_s.value:.0f}" for row in found] == ["1111", "2083", "4167"]
    assert [f"{row.speedup.value:.2f}" for row in found if row.speedup] == ["1.00", "1.88", "3.75"]
    assert [f"{row.efficiency.value:.4f}" for row in found if row.efficiency] == ["1.0000", "0.9375", "0.9375"]
    assert [row.serial_share.value for row in found if row.serial_share] == pytest.approx([1 / 15, 1 / 45])


@pytest.mark.parametrize(
    "text",
    [
        PUBLISHED.replace("images", " Samples "),
        PUBLISHED.replace("epoch_s", "seconds"),
        PUBLISHED.replace(",", ";").replace("45", "45,0"),
        PUBLISHED.replace(",", "\t"),
        "\ufeff" + PUBLISHED.replace("\n", "\r\n") + "\r\n",
        "workers,samples_per_s,samples\n1,1111.1111,50000\n2,2083.3333,50000\n4,4166.6667,50000\n",
    ],
)
def test_a_table_may_be_written_in_several_ways(table: Path, text: str) -> None:
    table.write_text(text, encoding="utf-8", newline="")

    assert [row.samples_per_s.value for row in rows(read_table(table))] == pytest.approx(
        [1111.11, 2083.33, 4166.67], abs=0.01
    )


def test_rows_of_one_number_of_workers_are_repeats(table: Path) -> None:
    table.write_text(PUBLISHED + PUBLISHED.split("\n", 1)[1])

    assert [cell.repeat for cell in read_table(table).cells] == [0, 0, 0, 1, 1, 1]


def test_a_batch_that_grows_with_the_workers_makes_it_weak_scaling(table: Path) -> None:
    table.write_text(
        "model,workers,batch_size,epoch_s,images\na,1,256,45,9\na,2,512,24,9\nb,1,256,45,9\nb,2,256,30,9\n"
    )

    assert [(cell.label, cell.mode) for cell in read_table(table).cells] == [
        *[("a", "weak")] * 2,
        *[("b", "strong")] * 2,
    ]


def test_columns_that_mean_nothing_here_are_named(table: Path) -> None:
    table.write_text("workers,seconds,samples,gpu\n1,2,3,V100\n")

    assert read_table(table).notes == ("Columns that were not used: gpu.",)


def test_rows_that_make_no_sense_are_named_by_line_and_column(table: Path) -> None:
    table.write_text("workers,epoch_s,samples\n1,45,50000\n\ntwo,24,50000\n4,,50000\n4,-1,50000\n2,5,5,9\n0,1,1\n")

    said = refused(table)

    assert said[0].startswith(f"{table}: nothing was read")
    assert [line.strip().split(":")[0] for line in said[1:]] == [
        "line 4, workers",
        "line 5, one of seconds, epoch_s, samples_per_s must have a figure",
        "line 6, epoch_s",
        "line 7, more fields than columns",
        "line 8, workers",
    ]
    assert "'two'" in said[1]


def test_a_row_that_is_there_twice_is_named_with_its_twin(table: Path) -> None:
    table.write_text("workers,repeat,seconds,samples\n1,0,2,3\n2,0,2,3\n1,0,2,3\n")

    assert "line 4, repeat: the same run as in line 2" in refused(table)[1]


def test_plain_loops_that_several_jobs_measured_are_more_repeats(table: Path) -> None:
    element = (
        "label,mode,workers,repeat,seconds,samples\na,baseline,1,0,{0},3\na,baseline,1,1,{0},3\na,strong,{0},0,2,3\n"
    )
    table.write_text(element.format(1) + element.format(2).split("\n", 1)[1])

    found = read_table(table).cells

    assert [(one.mode, one.workers, one.repeat, one.seconds) for one in found] == [
        *[("baseline", 1, 0, 1.0), ("baseline", 1, 1, 1.0), ("strong", 1, 0, 2.0)],
        *[("baseline", 1, 2, 2.0), ("baseline", 1, 3, 2.0), ("strong", 2, 0, 2.0)],
    ]


def test_no_more_than_ten_bad_rows_are_listed(table: Path) -> None:
    table.write_text("workers,seconds,samples\n" + "x,1,1\n" * 25)

    said = refused(table)

    assert len(said) == 1 + SHOWN + 1
    assert said[-1].strip() == "and 15 more"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "workers"),
        ("worker,seconds,samples\n1,1,1\n", "the column workers is missing. Its columns are worker, seconds"),
        ("workers,seconds\n1,1\n", r"samples \(or images\) is missing"),
        ("workers,samples\n1,1\n", "one of seconds, epoch_s, samples_per_s is missing"),
        ("workers,seconds,samples,workers\n1,1,1,1\n", "workers occurs twice"),
        ("workers,seconds,samples\n", "no rows"),
        ("workers,mode,seconds,samples\n2,fast,1,1\n", "'strong', 'weak' or 'baseline'"),
        ("workers,samples_per_s,samples\n1,0,1\n", "samples_per_s: needs a number above 0, not '0'"),
        ("workers,seconds,samples\n1,nan,1\n", "seconds"),
        ("workers,seconds,samples\n1,1,0\n", "samples and seconds above 0"),
        ("workers,seconds,samples,label\n1,1,1,=1+1\n", "line 2, label: begins with one of = .* not '=1.1'"),
        ("workers,seconds,samples,digest\n1,1,1,=1+1\n", "line 2, digest: "),
    ],
)
def test_what_a_table_lacks_is_said(table: Path, text: str, words: str) -> None:
    table.write_text(text)

    with pytest.raises(JobError, match=words):
        read_table(table)


def test_a_file_that_is_no_text_is_refused(table: Path) -> None:
    table.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(JobError, match="cannot be read"):
        read_table(table)


# --- what repeated runs come to


def test_the_first_epoch_is_left_out_where_there_are_later_ones() -> None:
    def cell(epoch: int, seconds: float, repeat: int = 0) -> Cell:
        return Cell(workers=1, repeat=repeat, epoch=epoch, samples=100, seconds=seconds, epoch_s=seconds)

    (row,) = rows(Results(cells=(cell(1, 49.0), cell(2, 45.0), cell(3, 46.0), cell(1, 50.0, repeat=1))))

    assert row.rates == pytest.approx(
        [(100 / 45 + 100 / 46) / 2, 100 / 50]
    )  # of the second run there is only the first epoch


def test_strong_and_weak_scaling_are_never_mixed() -> None:
    summary = summarized(MadeUp(modes=("strong", "weak")).results())

    assert {mode: [row.workers for row in found] for (mode, _), found in summary.items()} == {
        "strong": [1, 2, 4],
        "weak": [1, 2, 4],
        "baseline": [1],
    }
    strong, weak = (summary[mode, "small"][-1].speedup for mode in MODES[:2])
    assert strong is not None
    assert weak is not None
    assert strong.value == pytest.approx(0.306 / (0.075 + 0.04 + 0.006), rel=0.03)
    assert weak.value == pytest.approx(4 * 0.306 / (0.3 + 0.04 + 0.006), rel=0.03)


def test_speedups_against_one_worker_and_against_the_plain_loop_are_apart() -> None:
    alone, row, _ = rows(MadeUp().results())

    assert alone.speedup == Estimate(1.0)
    assert row.speedup is not None
    assert row.over_baseline is not None
    assert row.speedup.value == pytest.approx(0.306 / 0.176, rel=0.03)
    assert row.over_baseline.value == pytest.approx((256 / 0.176) / (5120 / 6.02), rel=0.03)


def test_workers_are_compared_with_the_plain_loop_that_has_as_many_threads() -> None:
    alone, two, four = rows(MadeUp(plain=(1, 2)).results())

    assert alone.over_equal == alone.over_baseline
    assert two.over_equal is not None
    assert two.over_equal.value == pytest.approx((256 / 0.176) / (2 * 5120 / 6.02), rel=0.03)
    assert four.over_equal is None
    assert four.over_baseline is not None


def test_one_worker_is_as_fast_as_itself_without_any_doubt() -> None:
    cells = tuple(Cell(workers=1, epoch=epoch, samples=100, seconds=40.0 + epoch) for epoch in range(1, 6))

    (row,) = rows(Results(cells=cells))

    assert row.samples_per_s.low is not None  # of epochs that differ
    assert (row.speedup, row.efficiency, row.serial_share) == (Estimate(1.0), Estimate(1.0), None)


def test_runs_that_failed_are_in_no_figure() -> None:
    good = Cell(workers=1, samples=10, seconds=1.0)
    bad = Cell(workers=1, repeat=1, samples=0, seconds=0.0, exit_code=139)

    assert rows(Results(cells=(good, bad)))[0].rates == [10.0]


def test_workers_that_shared_cores_have_no_speedup() -> None:
    crowded = rows(MadeUp(crowded=(4,)).results())[2]

    assert (crowded.workers, crowded.oversubscribed, crowded.speedup, crowded.over_baseline) == (4, True, None, None)


def test_the_epoch_follows_from_the_throughput_where_it_was_not_measured() -> None:
    row = rows(MadeUp(noise=0.0).results())[0]

    assert row.epoch_s is not None
    assert row.epoch_s.value == pytest.approx(50000 / 256 * 0.306)


def test_the_same_figures_have_the_same_interval() -> None:
    values = [1.0, 2.0, 4.0, 3.0, 9.0]

    assert median(values) == median(values)
    assert median(values) == Estimate(3.0, 1.0, 9.0)


def test_a_figure_that_was_measured_once_has_no_interval() -> None:
    assert median([5.0]) == Estimate(5.0)
    assert ratio([6.0], [3.0], paired=False) == Estimate(2.0)
    assert ratio([6.0, 7.0, 8.0], [3.5], paired=False) == Estimate(2.0)
    assert ratio([7.0], [3.0, 3.5, 4.0], paired=False) == Estimate(2.0)


def test_what_disturbs_a_pair_alike_does_not_widen_its_ratio() -> None:
    chance = random.Random(1)
    drift = [chance.uniform(1, 2) for _ in range(9)]
    ours, theirs = [2 * each for each in drift], drift

    together, apart = (ratio(ours, theirs, paired=paired) for paired in (True, False))

    assert together == Estimate(2.0)
    assert apart.spread is not None
    assert apart.spread > 0.1


def test_bootstrap_intervals_of_a_median_cover_it() -> None:
    chance = random.Random(2)
    covered = 0
    for _ in range(100):
        found = median([chance.gauss(10, 1) for _ in range(9)])
        covered += found.low is not None and found.high is not None and found.low <= 10 <= found.high
    assert covered >= 88  # percentiles of 9 figures are a little too narrow


# --- several studies


@pytest.mark.parametrize("name", ["=cmd", "-x", "@", "\t=1"])
def test_the_name_of_a_study_is_no_formula(name: str) -> None:
    study = MadeUp(labels=("",)).results()

    found = side_by_side([(name, study)])

    assert read_back(found) == found


def read_back(results: Results) -> Results:
    return Results.model_validate(results.model_dump())


def test_studies_beside_each_other_keep_their_labels_or_get_their_names() -> None:
    one, other, third = (MadeUp(labels=labels).results() for labels in (("a", "b"), ("b",), ("",)))

    found = side_by_side([("x", one), ("y", other), ("y", third)])

    assert list(dict.fromkeys(cell.label for cell in found.cells)) == ["a", "x: b", "y: b", "y (2)"]
    assert len(found.cells) == sum(len(each.cells) for each in (one, other, third))


def test_a_study_without_a_label_does_not_get_that_of_another() -> None:
    table, study = (MadeUp(labels=(label,)).results() for label in ("", "resnet"))

    for studies in ([("resnet", table), ("studies", study)], [("studies", study), ("resnet", table)]):
        labels = {cell.label for cell in side_by_side(studies).cells}
        assert labels == {"resnet", "studies: resnet"}
    mixed = MadeUp(labels=("", "resnet")).results()
    assert {cell.label for cell in side_by_side([("resnet", mixed)]).cells} == {"resnet", "resnet: resnet"}


def test_settings_that_differ_between_studies_are_found_by_the_label() -> None:
    one = MadeUp(labels=("a",)).results()
    other = one.model_copy(update={"settings": {**one.settings, "epoch_samples": 100}})

    found = side_by_side([("x", one), ("y", other)])

    assert found.settings["shards"] == 8
    assert found.settings["epoch_samples"] == {"x: a": 50000, "y: a": 100}
    assert found.figure("epoch_samples", "y: a") == 100
