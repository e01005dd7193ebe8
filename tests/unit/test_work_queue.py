"""The parts of steps are handed out, each once."""

import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from unisono.errors import NoProgress, WorkerLost
from unisono_lab.strategies.parameter_server import StalenessBound
from unisono_lab.strategies.queued_work import WorkQueue

pytestmark = pytest.mark.unit

PATIENCE_S = 20


def worked(queue: WorkQueue, worker: int, steps: int, *, pushes: bool) -> list[int]:
    """the items that a worker gets in so many steps."""
    found = []
    for step in range(steps):
        while (item := queue.claim(worker, step)) is not None:
            found.append(item)
            if pushes:
                queue.push(worker)
                queue.arrived(worker)
    return found


@pytest.mark.parametrize("bound", [None, 0, 1, 5])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_item_is_handed_out_once_to_many_threads(parts: int, bound: int | None) -> None:
    queue, steps, workers = WorkQueue(parts, StalenessBound(bound), PATIENCE_S), 60, 8
    with ThreadPoolExecutor(workers) as pool:
        each = [pool.submit(worked, queue, one, steps, pushes=bound is not None) for one in range(workers)]
        found = [future.result(PATIENCE_S) for future in each]
    assert Counter(item for mine in found for item in mine) == Counter(range(parts * steps))
    assert all(mine == sorted(mine) for mine in found)


def test_a_worker_gets_items_of_its_step_alone() -> None:
    queue = WorkQueue(2, StalenessBound(None), PATIENCE_S)
    assert [queue.claim(0, 0), queue.claim(1, 0)] == [0, 1]
    assert queue.claim(0, 0) is None
    assert queue.claim(0, 1) == 2
    assert queue.claim(1, 0) is None  # it is late, and there is nothing left for it


def test_what_is_left_of_a_step_that_all_have_left_is_not_handed_out() -> None:
    queue = WorkQueue(3, StalenessBound(None), PATIENCE_S)
    queue.next = 4  # of step 1 one part is gone, and then workers were lost
    assert queue.claim(0, 2) == 6


def test_whoever_skips_a_step_without_a_push_gets_the_next_one_and_holds_nobody_up() -> None:
    queue = WorkQueue(1, StalenessBound(0), PATIENCE_S)
    assert queue.claim(0, 0) == 0  # the loss is NaN
    assert queue.claim(0, 1) == 1
    waits = Waiter(queue, 1, 2)
    assert queue.claim(0, 3) == 3  # its part of step 1 is skipped, and so is step 2, which was handed to nobody
    assert waits.result() is None


def test_whoever_skips_the_last_step_wakes_those_who_wait_for_it() -> None:
    queue = WorkQueue(1, StalenessBound(0), PATIENCE_S)
    assert queue.claim(0, 0) == 0
    waits = Waiter(queue, 1, 1)
    assert queue.claim(0, 0) is None
    assert waits.result() == 1


def test_whoever_waits_for_a_turn_wakes_when_the_workers_part() -> None:
    queue = WorkQueue(1, StalenessBound(0), PATIENCE_S)
    assert queue.claim(0, 0) == 0
    waits = Waiter(queue, 1, 1)
    queue.end()
    with pytest.raises(WorkerLost, match="waited for their turn"):
        waits.result()
    with pytest.raises(WorkerLost):
        queue.claim(2, 1)


def test_whoever_only_goes_along_waits_until_a_step_is_taken() -> None:
    queue = WorkQueue(2, StalenessBound(None), timeout_s=0.1)
    for worker in (0, 1):
        with pytest.raises(NoProgress, match="rank 2 waited for its turn in vain, which comes after"):
            queue.taken(2, 0)
        assert queue.claim(worker, 0) == worker
    queue.taken(2, 0)
    with ThreadPoolExecutor(1) as pool:
        patient = WorkQueue(2, StalenessBound(None), PATIENCE_S)
        waits = pool.submit(patient.taken, 2, 0)
        assert [patient.claim(0, 0), patient.claim(1, 0)] == [0, 1]
        waits.result(PATIENCE_S)


def test_whoever_waits_for_a_worker_that_does_not_come_back_says_for_which() -> None:
    queue = WorkQueue(1, StalenessBound(1), timeout_s=0.1)
    assert [queue.claim(1, 0), queue.claim(2, 1)] == [0, 1]
    queue.push(1)
    words = "rank 0 waited for its turn in vain, which comes after rank 1, rank 2. It hangs.*timeout_s"
    with pytest.raises(NoProgress, match=words):
        queue.claim(0, 2)
    queue.arrived(1)
    assert queue.claim(0, 2) == 2
    with pytest.raises(NoProgress, match="which comes after rank 2"):
        queue.push(0)


class Waiter:
    """A worker that waits for an item on a thread of its own."""

    def __init__(self, queue: WorkQueue, worker: int, step: int) -> None:
        self._found: Future[int | None] = Future()
        self._thread = threading.Thread(target=self._claim, args=(queue, worker, step))
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not queue._changed._waiters:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, "it does not wait"
            time.sleep(0.001)

    def result(self) -> int | None:
        with ExitStack() as ending:
            ending.callback(self._thread.join, PATIENCE_S)
            return self._found.result(PATIENCE_S)

    def _claim(self, queue: WorkQueue, worker: int, step: int) -> None:
        try:
            self._found.set_result(queue.claim(worker, step))
        except WorkerLost as error:
            self._found.set_exception(error)
