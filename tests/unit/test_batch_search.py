"""The search for the largest batch, against memories that are made up."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import JobError
from unisono_lab.study.batch_search import RESOLUTION, BatchSearch, finished_trial, searched
from unisono_lab.study.results import BatchCurve, Tried, read_batch_curve

pytestmark = pytest.mark.unit

MOST_TRIALS = 80
"""More would be a search that does not end."""


@dataclass
class Machine:
    """A machine on which a batch needs ``base + batch`` of a memory, give or take.

    Attributes:
        room: batches up to this one fit.
        noise: share of the room by which what a trial needs differs from trial to trial.
        shards: of the job.
        data: samples of the data set; None for more than anybody tries.
        fastest: batch at which throughput has its peak.
        seed: of the noise.
        asked: what was tried.
    """

    room: int
    noise: float = 0.0
    shards: int | None = None
    data: int | None = None
    fastest: int = 100
    seed: int = 0
    asked: list[int] = field(default_factory=list)

    def attempt(self, batch: int) -> Tried:
        assert len(self.asked) < MOST_TRIALS, self.asked
        self.asked.append(batch)
        needed = batch * (1 + self.noise * Random(f"{self.seed}/{len(self.asked)}").uniform(-1, 1))
        fits = needed <= self.room
        speed = 1000 / (1 + abs(batch - self.fastest) / self.fastest)
        if not fits:
            return Tried(batch, fits=False, shards=self.shards)
        return Tried(batch, True, speed, needed, self.shards, self.data)

    def search(self, wanted: BatchSearch) -> BatchCurve:
        return searched(wanted, self.attempt, lambda tried: None)


@given(room=st.integers(1, 10**6), first=st.integers(1, 5000))
def test_where_memory_is_monotone_the_largest_is_known_to_its_resolution(room: int, first: int) -> None:
    found = Machine(room).search(BatchSearch(first=first))
    assert found.largest is not None
    assert found.largest <= room <= found.largest * (1 + RESOLUTION) + 1
    assert found.bound == "memory"


@given(room=st.integers(64, 10**5), shards=st.integers(1, 64), workers=st.integers(1, 8))
def test_batches_between_two_are_multiples_of_the_shards(room: int, shards: int, workers: int) -> None:
    machine = Machine(room, shards=shards)
    whole = machine.search(BatchSearch(workers))
    assert whole.largest is not None
    assert whole.largest <= room < whole.largest * (1 + RESOLUTION) + shards + 1
    assert all(batch * workers % shards == 0 for batch in machine.asked[1:])  # of the first nothing is known


@given(room=st.integers(100, 10**5), noise=st.floats(0, 0.05), seed=st.integers(0, 1000), margin=st.floats(0, 0.5))
def test_near_a_noisy_limit_the_search_ends_and_its_answers_were_tried(
    room: int, noise: float, seed: int, margin: float
) -> None:
    whole = Machine(room, noise=noise, seed=seed).search(BatchSearch(margin=margin))
    found, trials = whole, {one.batch: one for one in whole.rows}
    assert found.largest is not None
    assert found.with_margin is not None
    assert room * (1 - 2 * noise) * (1 - RESOLUTION) - 2 <= found.largest <= room * (1 + 2 * noise)
    for batch in (found.largest, found.with_margin, found.best):
        assert batch is not None
        assert trials[batch].fits
    assert found.with_margin <= max(found.largest * (1 - margin), 1)
    assert not any(not one.fits and one.batch < found.largest for one in trials.values())


@given(room=st.integers(64, 10**5), fastest=st.integers(8, 10**5), margin=st.floats(0, 0.5))
def test_nothing_that_was_timed_and_leaves_the_margin_is_faster_than_the_best(
    room: int, fastest: int, margin: float
) -> None:
    whole = Machine(room, fastest=fastest).search(BatchSearch(margin=margin))
    best, limit = whole.best, whole.with_margin
    assert best is not None
    assert limit is not None
    assert best <= limit
    rates = {row.batch: row.samples_per_s or 0 for row in whole.rows}
    assert rates[best] == max(rate for batch, rate in rates.items() if batch <= limit)
    if 16 <= fastest <= limit:  # between two powers of two the peak is not looked for
        assert 1000 / rates[best] <= 1.5


@given(room=st.integers(1, 10**5), data=st.integers(8, 10**5), workers=st.integers(1, 8))
def test_more_than_an_epoch_has_is_tried_at_most_once(room: int, data: int, workers: int) -> None:
    machine = Machine(room, data=data)
    found = machine.search(BatchSearch(workers))
    assert sum(batch * workers > data for batch in machine.asked if batch <= room) <= 1
    if data // workers <= room and found.bound == "data":
        assert found.largest == found.with_margin == data // workers


def test_the_bound_is_the_one_that_was_met() -> None:
    def bound(data: int, most: int | None, room: int = 10**6) -> str:
        return Machine(room, data=data).search(BatchSearch(most=most)).bound

    assert bound(1000, None) == "data"
    assert bound(1000, 1000) == "most"
    assert bound(1000, 500) == "most"
    assert bound(500, 1000) == "data"
    assert bound(1000, 800, room=300) == "memory"


def test_where_nothing_fits_the_smallest_was_tried() -> None:
    machine = Machine(0)
    assert machine.search(BatchSearch()).largest is None
    assert machine.asked == [16, 8, 4, 2, 1]
    machine = Machine(0, shards=8)
    assert machine.search(BatchSearch(2)).largest is None
    assert machine.asked[-1] == 4  # every shard needs a sample


def test_a_report_reads_what_a_search_has_kept(tmp_path: Path) -> None:
    search = BatchSearch(2, margin=0.2)
    curve = searched(search, Machine(3000).attempt, lambda tried: None, 500.0, "unisono batch-size train.py")
    (tmp_path / "batch-size.json").write_text(json.dumps(curve.model_dump(mode="json")))
    assert read_batch_curve(tmp_path) == curve


def test_what_needed_a_little_more_than_the_limit_is_told_to_have_needed_more(run_folder: Callable[..., Path]) -> None:
    def attempt(batch: int) -> Tried:
        workers = [{"device": "cpu", "peak_memory_mib": 329.9 + batch / 1000}]
        return finished_trial(run_folder([1.0], result={"workers": workers}), batch, None, 330.0)

    rows = searched(BatchSearch(), attempt, lambda tried: None, 330.0).rows
    assert {row.fits for row in rows} == {True, False}
    assert all(((row.peak_mib or 0.0) > 330.0) != row.fits for row in rows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"first": 0}, "--from 0"),
        ({"most": 8}, "--most 8: needs at least --from 16"),
        ({"margin": 1.0}, "--margin 1"),
        ({"margin": -0.1}, "--margin -0.1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        BatchSearch(**wrong).check()


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """A run folder with steps of so many seconds each."""
    numbers = count()

    def made(seconds: list[float], batch: int = 32, result: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / f"run-{next(numbers)}"
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps({"batch_size": batch, "shards": 4}))
        (folder / "journal.jsonl").write_text('{"event": "started"}\n')
        lines = [
            {"step": step, "loss": 1.0, "batch_size": batch, "seconds": {"total": each}}
            for step, each in enumerate(seconds)
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        if result is not None:
            (folder / "result.json").write_text(json.dumps(result))
        return folder

    return made


def test_a_trials_throughput_is_the_median_without_its_first_steps(run_folder: Callable[..., Path]) -> None:
    workers = [{"device": "cpu", "peak_memory_mib": 300.0}, {"device": "cpu", "peak_memory_mib": 310.0}]
    folder = run_folder([9.0, 9.0, *[0.5] * 10, *[0.1] * 8], result={"workers": workers, "dataset_samples": 1000})
    tried = finished_trial(folder, 16, 250.0)
    assert tried == Tried(16, True, 64.0, 310.0, 4, 1000)


def test_the_data_end_where_they_do_and_not_where_an_epoch_of_whole_batches_does(
    run_folder: Callable[..., Path],
) -> None:
    def attempt(batch: int) -> Tried:  # of a script with drop_last
        result = {"epoch_samples": 1797 // batch * batch, "dataset_samples": 1797}
        return finished_trial(run_folder([1.0, 1.0], batch, result), batch, None)

    whole = searched(BatchSearch(first=512), attempt, lambda tried: None)
    assert (whole.largest, whole.bound) == (1796, "data")  # four shards, with 449 samples each
    assert [row.batch for row in whole.rows] == [512, 1024, 1796]


def test_a_worker_that_grew_beyond_its_limit_when_nobody_looked_did_not_fit(run_folder: Callable[..., Path]) -> None:
    workers = [{"device": "cuda:0", "peak_memory_mib": 300.0, "peak_device_memory_mib": 9000.0}]
    folder = run_folder([1.0, 1.0], result={"workers": workers})
    assert finished_trial(folder, 16, 250.0, 300.0).fits
    tried = finished_trial(folder, 16, 250.0, 299.0)
    assert (tried.fits, tried.peak_mib, tried.shards) == (False, 300.0, 4)
    assert tried.words == "a worker needed 300.0 MiB, more than its limit of 299"


def test_a_script_without_steps_is_refused(run_folder: Callable[..., Path]) -> None:
    with pytest.raises(JobError, match="took no step"):
        finished_trial(run_folder([]), 16, None)
