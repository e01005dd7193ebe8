"""A loop that somebody else controls: it begins where the others are, and ends where it is told to."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import unisono
from benchmarks.thread_crew import Trade, train
from script_cluster import Cluster, Kill
from struck_run import loss, momentum, network
from unisono.adapt.view import Policy
from unisono.errors import JobError, JobMismatch
from unisono.job import Job
from unisono.train.step_loop import LoopPlace

Start = Callable[..., unisono.Run]

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm")

JOB = Job.create(batch_size=8, shards=4)
SAMPLES = 48
"""Six batches."""

EPOCHS, STEPS = 3, 18


def of_one_worker(test: Any) -> Any:
    """A unit test of a run of a single worker."""
    return pytest.mark.unit(pytest.mark.usefixtures("one_worker")(test))


def of_several_workers(test: Any) -> Any:
    """A test of whole jobs on threads."""
    return pytest.mark.cluster(pytest.mark.usefixtures("torch_settings_restored")(test))


class Guest:
    """Somebody else's trainer: it counts epochs and batches by itself, and knows nothing of resumed runs."""

    def __init__(self) -> None:
        self.steps, self.losses = 0, list[float]()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.losses = state["steps"], state["losses"]


DATA = TensorDataset(torch.linspace(-2, 2, SAMPLES * 4).sin().view(-1, 4))


def prepared(run: unisono.Run) -> torch.optim.Optimizer:
    model = network()
    run.prepare(model, optimizer := momentum(model.parameters()))
    return optimizer


def fit(run: unisono.Run, max_steps: int | None = None) -> tuple[LoopPlace, str, Guest]:
    optimizer = prepared(run)
    guest = run.register("guest", Guest())
    steps = run.steps(DATA, epochs=EPOCHS, max_steps=max_steps)
    place = run.enter()
    assert guest.steps == (0 if place.is_over else place.step)
    first = place.batch
    for epoch in range(place.epoch, 0 if place.is_over else EPOCHS):
        for batch, step in enumerate(steps, first):
            assert (step.epoch, step.number) == (epoch, guest.steps)
            assert step.position == epoch * SAMPLES + batch * 8
            guest.losses.append(step.run(loss, update=optimizer.step))
            guest.steps += 1
            if step.is_last_in_epoch:
                break
        first = 0
    for step in steps:
        raise AssertionError(f"{step.number} is left")
    return place, run.finish(), guest


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    ((place, digest, guest),) = train(Trade(JOB, 1, tmp_path_factory.mktemp("serial") / "run"), fit)
    assert place == LoopPlace(0, 0)
    assert guest.steps == STEPS
    return digest, guest.losses


@of_several_workers
@pytest.mark.parametrize("workers", [2, 3])
def test_a_guests_loop_ends_in_the_same_bits_on_any_number_of_workers(
    workers: int, serial: tuple[str, list[float]], tmp_path: Path
) -> None:
    found = train(Trade(JOB, workers, tmp_path / "run"), fit)
    assert [(digest, guest.losses) for _, digest, guest in found] == [serial] * workers


@of_several_workers
@pytest.mark.parametrize(("stop", "place"), [(8, LoopPlace(8, 64, 1, 2)), (12, LoopPlace(12, 96, 2, 0))])
def test_a_guest_goes_on_where_its_run_was_stopped(
    stop: int, place: LoopPlace, serial: tuple[str, list[float]], tmp_path: Path
) -> None:
    trade = Trade(JOB, 3, tmp_path / "run", checkpoint_every=4, stop_after=stop)
    assert [guest.steps for _, _, guest in train(trade, fit)] == [stop] * 3
    found = train(replace(trade, workers=2, stop_after=None), fit)
    assert [(each, digest, guest.losses) for each, digest, guest in found] == [(place, *serial)] * 2
    (again,) = train(replace(trade, workers=1, stop_after=None), fit)
    assert again[0] == LoopPlace(STEPS, EPOCHS * SAMPLES, is_over=True)
    assert again[1] == serial[0]


def fit_in_two_loops(run: unisono.Run) -> str:
    """Two loops of one and a half epochs each, which are begun only where something is left of them."""
    prepared(run)
    for most in (9, 18):
        steps = run.steps(DATA, epochs=EPOCHS, max_steps=most)
        if not run.enter().is_over:
            for step in steps:
                step.run(loss)
    return run.finish()


@of_several_workers
@pytest.mark.parametrize("stop", [8, 9, 13, 17])
def test_a_run_goes_on_in_its_second_loop_where_the_first_is_not_begun_again(stop: int, tmp_path: Path) -> None:
    (serial,) = train(Trade(JOB, 1, tmp_path / "serial"), fit_in_two_loops)
    trade = Trade(JOB, 2, tmp_path / "run", checkpoint_every=4, stop_after=stop)
    cut = train(trade, fit_in_two_loops)
    assert train(replace(trade, workers=1), fit_in_two_loops) == cut[:1]
    assert train(replace(trade, workers=3, stop_after=None), fit_in_two_loops) == [serial] * 3


@of_one_worker
def test_a_loop_is_over_after_as_many_steps_as_it_may_have(start: Start) -> None:
    run = start(batch_size=8, shards=4)
    place, _, guest = fit(run, max_steps=8)
    assert (place.step, guest.steps) == (0, 8)


@of_one_worker
def test_the_last_step_that_a_loop_may_have_is_its_last(start: Start) -> None:
    prepared(run := start(batch_size=8, shards=4))
    last = [step.is_last for step in run.steps(DATA, epochs=9, max_steps=2) if step.run(loss)]
    assert last == [False, True]
    assert list(run.steps(DATA, max_steps=2)) == []


@of_one_worker
def test_a_loop_that_was_entered_and_is_not_begun_is_left(start: Start) -> None:
    prepared(run := start(batch_size=8, shards=4))
    with pytest.raises(JobError, match=r"run.enter: there is no loop .* steps = run.steps\(…\)"):
        run.enter()
    run.steps(DATA)
    assert run.enter() == run.enter() == LoopPlace(0, 0)
    for step in run.steps(DATA, max_steps=3):
        step.run(loss)
    with pytest.raises(JobError, match=r"run.enter: there is no loop"):
        run.enter()
    held = run.steps(DATA)
    assert run.enter() == LoopPlace(3, 24)
    run.finish()
    held.close()


@of_one_worker
def test_what_all_do_together_returns_what_it_returns_and_draws_nothing(start: Start) -> None:
    run = start(batch_size=8, shards=4)
    before = torch.get_rng_state()
    found = run.together(lambda workers: [workers.rank, workers.world_size, workers.gather_json(torch.rand(1).numel())])
    assert found == [0, 1, [1]]
    assert torch.equal(torch.get_rng_state(), before)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import unisono
from unit.test_enter import fit

place, _, guest = fit(unisono.init(batch_size=8, shards=4, checkpoints=unisono.Checkpoints(every=4)))
print("after", guest.steps, [loss.hex() for loss in guest.losses], flush=True)
print("entered", place.step, place.is_over, flush=True)
"""


@pytest.mark.cluster
@pytest.mark.parametrize("kills", [[Kill(4, 1)], [Kill(3, 0, 5), Kill(9, 2, 3), Kill(13, 1, 7)]])
def test_whoever_joins_begins_the_guests_loop_where_the_others_are(
    kills: list[Kill], serial: tuple[str, list[float]], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    done = Cluster(tmp_path)(script, (3, 3), shards=4, kills=kills)
    assert done.digest == serial[0]
    assert done.said == [f"after {STEPS} {[loss.hex() for loss in serial[1]]}"]
    assert any(int(line.split()[1]) > 3 for line in done.printed.splitlines() if line.startswith("entered"))


def of_sizes(run: unisono.Run, *sizes: int | None, total: int = 2) -> tuple[str, list[int], list[int]]:
    """Loops with batches of these sizes, one after the other."""
    prepared(run)
    found, numbers = list[int](), list[int]()
    for size in sizes:
        for step in run.steps(DATA, epochs=total, batch_size=size):
            step.run(loss)
            found.append(step.size)
            numbers.append(step.number)
    return run.finish(), found, numbers


@of_several_workers
def test_each_loop_may_have_a_batch_size_of_its_own_and_the_bits_stay(tmp_path: Path) -> None:
    found = [train(Trade(JOB, w, tmp_path / str(w)), lambda run: of_sizes(run, 16, None, 12)) for w in (1, 2, 3)]
    ((serial, sizes, numbers),) = found[0]
    assert sizes == [16] * 6 + [8] * 12 + [12] * 8
    assert numbers == list(range(26))
    assert all(each == [(serial, sizes, numbers)] * (1 + place) for place, each in enumerate(found))
    whole = train(Trade(Job.create(batch_size=16, shards=4), 1, tmp_path / "job"), lambda run: of_sizes(run, None))
    late = train(Trade(JOB, 1, tmp_path / "late"), lambda run: of_sizes(run, 16))
    assert whole == late


@of_several_workers
def test_a_job_without_a_batch_size_takes_that_of_each_loop_and_the_bits_stay(tmp_path: Path) -> None:
    def script(run: unisono.Run) -> tuple[str, list[int], float]:
        prepared(run)
        sizes = list[int]()
        for steps in (run.steps(DataLoader(DATA, batch_size=16)), run.steps(DATA, batch_size=12)):
            for step in steps:
                step.run(loss)
                sizes.append(step.size)
        found = run.evaluate(DATA, lambda model, batch: {"loss": loss(model, batch)})
        return run.finish(), sizes, found["loss"]

    late = Job.create(shards=4)
    ((_, sizes, _),) = serial = train(Trade(late, 1, tmp_path / "1"), script)
    assert sizes == [16] * 3 + [12] * 4
    for workers in (2, 3):
        assert train(Trade(late, workers, tmp_path / str(workers)), script) == serial * workers
    (told,) = train(Trade(JOB, 1, tmp_path / "told"), lambda run: of_sizes(run, 16, 12, total=1))
    (untold,) = train(Trade(late, 1, tmp_path / "untold"), lambda run: of_sizes(run, 16, 12, total=1))
    assert told == untold


@of_one_worker
def test_a_loop_whose_batch_nobody_says_is_refused_with_the_ways_to_say_it(start: Start) -> None:
    with pytest.raises(JobError, match=r"nobody says how many samples a global batch has.*DataLoader.*unisono\.init"):
        of_sizes(start(batch_size=None), None)


@of_several_workers
def test_a_run_goes_on_with_the_batch_size_of_its_loop_and_with_no_other(tmp_path: Path) -> None:
    (serial,) = train(Trade(JOB, 1, tmp_path / "serial"), lambda run: of_sizes(run, 16, 12))
    for stop in (3, 8):
        trade = Trade(JOB, 3, tmp_path / str(stop), checkpoint_every=1, stop_after=stop)
        train(trade, lambda run: of_sizes(run, 16, 12))
        again = replace(trade, workers=2, stop_after=None)
        other = (12, 12) if stop < 6 else (16, 16)
        with pytest.raises(JobMismatch, match=r"batches of \d+ samples here, and had \d+ when its checkpoint"):
            train(replace(again, workers=1), lambda run, other=other: of_sizes(run, *other))  # type: ignore[misc]
        assert [digest for digest, _, _ in train(again, lambda run: of_sizes(run, 16, 12))] == [serial[0]] * 2


@of_one_worker
def test_a_batch_size_that_cannot_be_is_refused_in_clear_words(start: Start) -> None:
    with pytest.raises(JobError, match=r"batch_size=0\): needs a number of samples from 1 on"):
        of_sizes(start(batch_size=8, shards=4), 0)
    with pytest.raises(JobError, match=r"batch_size=16\): policies need the job's batch size .* which is 8"):
        of_sizes(start(batch_size=8, shards=4, policies=[Policy()]), 16)


def fit_behind(run: unisono.Run, begin: int) -> str:
    """The first steps in one loop, and what is left of the data in another run, as a framework's checkpoint has it."""
    torch.manual_seed(0)
    model = network()
    optimizer = momentum(model.parameters())
    if begin:
        weights, moments = deepcopy(BEHIND[begin])
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    run.prepare(model, optimizer)
    for step in run.steps(DATA, epochs=EPOCHS, begin=begin):
        step.run(loss)
        BEHIND[step.number + 1] = deepcopy((model.state_dict(), optimizer.state_dict()))
    return run.finish()


BEHIND: dict[int, Any] = {}


@of_several_workers
def test_a_loop_begins_behind_the_steps_that_a_checkpoint_of_somebody_elses_has(tmp_path: Path) -> None:
    BEHIND.clear()
    whole = train(Trade(JOB, 1, tmp_path / "whole"), partial(fit_behind, begin=0))
    for begin, workers in ((7, 3), (12, 2), (STEPS, 1)):
        rest = train(Trade(JOB, workers, tmp_path / f"rest-{begin}"), partial(fit_behind, begin=begin))
        assert rest == whole * workers


@of_one_worker
@pytest.mark.parametrize("what", ["max_steps", "epochs", "begin"])
def test_numbers_below_0_are_no_bounds_of_a_loop(start: Start, what: str) -> None:
    prepared(run := start(batch_size=4))
    bounds: dict[str, Any] = {"epochs": 1, what: -1}
    with pytest.raises(JobError, match=rf"run.steps\({what}=-1\): needs a number from 0 on"):
        run.steps(DATA, **bounds)
