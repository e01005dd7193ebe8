"""Which steps a loop has, and where a run stands before, between and after them."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from unisono.adapt.view import BatchShape
from unisono.data.shards import ShardsRequest
from unisono.errors import JobMismatch
from unisono.plan.batches import Batches, Position
from unisono.train.loop.course import CutCourse
from unisono.train.state.trained import Reading, RunProgress
from unisono.train.step.step import Step
from unisono.train.step_loop import Loop

pytestmark = pytest.mark.unit


def loop(
    number: int = 0, samples: int = 70, epochs: int = 2, stop_after: int | None = None, *, drop_last: bool = False
) -> Loop:
    """Three steps per epoch: of 32, 32 and 6 samples, in two shards each."""
    course = CutCourse(Batches.even(samples, 32, 2, drop_last), Requested)
    return Loop(number, Reading(samples, True, False), course, epochs, stop_after)


def requested(loop: Loop, start: Position, shards: range) -> list[ShardsRequest]:
    """What a worker with these shards reads from a position on."""
    assert isinstance(loop.course, CutCourse)
    return list(loop.course.requests(loop.epochs, loop.is_cut, start, (shards, BatchShape(32, 2))))


class Requested:
    """Hands out the requests themselves."""

    def __init__(self, requests: Iterator[ShardsRequest]) -> None:
        self._requests = requests
        self.closed = False

    def __next__(self) -> list[Any]:
        return [next(self._requests)]

    def is_ready(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


@dataclass
class Run:
    """Notes what a loop tells it."""

    progress: RunProgress = field(default_factory=RunProgress)
    events: list[str] = field(default_factory=list)
    whole: bool = True
    batch_size: int = 32
    shard_count: int = 2
    stopped: bool = False
    loaded: Requested | None = None
    goes_back: tuple[int, RunProgress] | None = None

    def steps(self, loop: Loop) -> Generator[Step, None, None]:
        assert isinstance(loop.course, CutCourse)
        return replace(loop, course=replace(loop.course, load=self._load)).steps(self.progress, cast("Any", self))

    def _load(self, requests: Iterator[ShardsRequest]) -> Requested:
        self.loaded = Requested(requests)
        return self.loaded

    def shards(self) -> range:
        return range(self.shard_count // 2, self.shard_count)

    def compute(self, *arguments: Any) -> float:
        return 0.0

    def move(self, progress: RunProgress) -> None:
        self.progress = progress

    def begin(self, step: Step) -> None:
        self.events.append(f"begin {step.number}")

    def end(self, after: RunProgress | None) -> None:
        self.events.append("ended" if after else "dropped")
        self.progress = after or self.progress

    def enter(self) -> None:
        pass

    def boundary(self, *, is_end: bool) -> RunProgress:
        if not is_end:
            self.events.append("boundary")
        if self.goes_back is not None and self.progress.position.step == self.goes_back[0]:
            self.progress, self.goes_back = self.goes_back[1], None
        return self.progress

    def is_whole(self) -> bool:
        return self.whole

    def shape(self) -> BatchShape:
        return BatchShape(self.batch_size, self.shard_count)

    def is_stopped(self) -> bool:
        return self.stopped

    def cut_short(self) -> None:
        self.events.append("cut short")


@contextmanager
def left_in_the_body_of(run: Run, loop: Loop, step: int) -> Iterator[None]:
    """Run all steps before this one; leave the loop in its body, once the caller is done there."""
    steps = run.steps(loop)
    for each in steps:
        if each.number == step:
            yield
            steps.close()
            return
        each.run(None)  # type: ignore[arg-type]


def test_a_loop_through_all_epochs_ends_before_the_next_loop() -> None:
    run = Run()
    requests = [step.shards[0] for step in run.steps(loop(epochs=2))]
    assert requests[:3] == [(0, (range(16, 32),)), (0, (range(48, 64),)), (0, (range(67, 70),))]
    assert [request.epoch for request in requests] == [0, 0, 0, 1, 1, 1]
    assert run.events[:4] == ["begin 0", "ended", "boundary", "begin 1"]
    assert run.progress == RunProgress(Position(step=6, samples=140), loop=1)
    assert run.loaded is not None
    assert run.loaded.closed


@pytest.mark.parametrize("reached", [4, 6])
def test_a_loop_yields_steps_again_after_the_run_has_gone_back(reached: int) -> None:
    run = Run()
    run.goes_back = reached, RunProgress(Position(step=2, samples=64, offset=64), 0, Reading(70, True, False))
    seen = [(step.number, step.shards[0]) for step in run.steps(loop(epochs=2))]
    numbers = [number for number, _ in seen]
    assert numbers == [*range(reached), *range(2, 6)]
    assert seen[-4:] == list(dict(seen).items())[2:]  # with the same samples


def test_a_loop_that_the_run_has_behind_it_yields_nothing() -> None:
    run = Run(RunProgress(Position(step=6, samples=140), loop=1))
    assert list(run.steps(loop(number=0))) == []
    assert (run.events, run.loaded) == ([], None)


def test_a_loop_that_resumes_goes_on_where_the_run_stands() -> None:
    run = Run(RunProgress(Position(step=4, samples=102, epoch=1, offset=32), 0, Reading(70, True, False)))
    assert [step.number for step in run.steps(loop())] == [4, 5]


def test_a_loop_that_resumes_with_other_data_is_refused() -> None:
    run = Run(RunProgress(Position(step=4, samples=102, epoch=1, offset=32), 0, Reading(70, True, False)))
    with pytest.raises(JobMismatch, match="samples: 50 here, 70 there"):
        next(run.steps(loop(samples=50)))


def test_a_loop_after_one_that_was_given_up_begins_at_its_own_start() -> None:
    run = Run(RunProgress(Position(step=4, samples=102, epoch=1, offset=32), 0, Reading(70, True, False)))
    first = next(run.steps(loop(number=1, samples=50)))
    assert (first.number, first.position, first.epoch) == (4, 102, 0)


def test_a_loop_that_is_cut_short_stays_where_it_is_and_reads_no_further() -> None:
    run = Run()
    cut = loop(stop_after=4)
    assert [step.number for step in run.steps(cut)] == [0, 1, 2, 3]
    assert run.progress == RunProgress(Position(step=4, samples=102, epoch=1, offset=32), 0, Reading(70, True, False))
    assert run.events[-1] == "cut short"
    assert len(requested(cut, Position(), range(2))) == 4
    assert list(run.steps(loop(number=1, stop_after=4))) == []
    assert (run.progress.loop, run.events.count("cut short")) == (0, 1)
    assert [step.number for step in run.steps(loop())] == [4, 5]


def test_a_job_is_cut_short_after_as_many_samples_as_so_many_epochs_have_in_whatever_loops() -> None:
    def cut(number: int) -> Loop:
        return replace(loop(number), stop_after_epochs=3)

    run = Run()
    assert [step.number for step in run.steps(cut(0))] == [0, 1, 2, 3, 4, 5]
    assert [step.number for step in run.steps(cut(1))] == [6, 7, 8]
    assert run.progress.position.samples == 210
    assert list(run.steps(cut(2))) == []
    assert len(requested(cut(2), Position(6, 140), range(2))) == 3


def test_a_break_counts_the_step_that_was_run_and_ends_the_loop() -> None:
    run = Run()
    for step in (steps := run.steps(loop())):
        step.run(None)  # type: ignore[arg-type]
        if step.number == 1:
            break
    steps.close()
    assert run.events[-2:] == ["begin 1", "ended"]
    assert run.progress == RunProgress(Position(step=2, samples=64), loop=1)


def test_a_break_before_the_step_was_run_does_not_count_it() -> None:
    run = Run()
    with left_in_the_body_of(run, loop(), 1):
        pass
    assert run.events[-2:] == ["begin 1", "dropped"]
    assert run.progress == RunProgress(Position(step=1, samples=32), loop=1)


def test_a_step_that_failed_leaves_the_run_before_it_in_the_same_loop() -> None:
    run = Run()
    with left_in_the_body_of(run, loop(), 1):
        run.whole = False
    assert run.events[-1] == "dropped"
    assert (run.progress.position.step, run.progress.loop) == (1, 0)
    assert run.loaded is not None
    assert run.loaded.closed


def test_each_request_names_the_places_of_all_the_shards_that_are_asked_for() -> None:
    requests = requested(loop(epochs=1), Position(step=1, samples=32, offset=32), range(1, 2))
    assert [request.places for request in requests] == [(range(48, 64),), (range(67, 70),)]


def test_a_batch_that_changes_between_steps_leaves_no_sample_out_and_uses_none_twice() -> None:
    run = Run()
    seen: list[tuple[int, int, int]] = []
    for step in run.steps(loop(epochs=2)):
        seen.append((step.epoch, step.batch.start, step.batch.stop))
        run.batch_size = {0: 16, 1: 8, 3: 64}.get(step.number, run.batch_size)
    assert seen == [(0, 0, 32), (0, 32, 48), (0, 48, 56), (0, 56, 64), (0, 64, 70), (1, 0, 64), (1, 64, 70)]


def test_with_drop_last_an_epoch_ends_where_a_batch_that_has_grown_does_not_fit_any_more() -> None:
    run = Run()
    seen: list[tuple[int, int, int]] = []
    for step in run.steps(loop(epochs=2, drop_last=True)):
        seen.append((step.epoch, step.batch.start, step.batch.stop))
        run.batch_size = 48
    assert seen == [(0, 0, 32), (1, 0, 48)]


def test_a_loop_that_is_stopped_ends_at_the_boundary() -> None:
    run = Run()
    for step in run.steps(loop()):
        run.stopped = step.number == 1
    assert run.progress == RunProgress(Position(step=2, samples=64), loop=1)


def test_a_batch_that_is_cut_finer_between_steps_is_loaded_in_the_shards_that_there_are_then() -> None:
    run = Run()
    seen: list[Any] = []
    for step in run.steps(loop(epochs=1)):
        seen.append((step.batch.shards, step.shards[0].places))
        run.batch_size, run.shard_count = (30, 6) if step.number == 0 else (32, 2)
    assert seen == [
        (2, (range(16, 32),)),
        (6, (range(47, 52), range(52, 57), range(57, 62))),
        (2, (range(66, 70),)),
    ]
