"""The parts of steps are handed out, each once."""

import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from unisono.errors import NoProgress, WorkerLost
from unisono.sync.parameter_server import Reads
from unisono.train.strategies.shared_work import Tickets

pytestmark = pytest.mark.unit

PATIENCE_S = 20


def worked(tickets: Tickets, worker: int, steps: int, *, pushes: bool) -> list[int]:
    """The tickets that a worker gets in so many steps."""
    found = []
    for step in range(steps):
        while (ticket := tickets.claim(worker, step)) is not None:
            found.append(ticket)
            if pushes:
                tickets.push(worker)
                tickets.arrived(worker)
    return found


@pytest.mark.parametrize("bound", [None, 0, 1, 5])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_ticket_is_handed_out_once_to_many_threads(parts: int, bound: int | None) -> None:
    tickets, steps, workers = Tickets(parts, Reads(bound), PATIENCE_S), 60, 8
    with ThreadPoolExecutor(workers) as pool:
        each = [pool.submit(worked, tickets, one, steps, pushes=bound is not None) for one in range(workers)]
        found = [future.result(PATIENCE_S) for future in each]
    assert Counter(ticket for mine in found for ticket in mine) == Counter(range(parts * steps))
    assert all(mine == sorted(mine) for mine in found)


def test_a_worker_gets_tickets_of_its_step_alone() -> None:
    tickets = Tickets(2, Reads(None), PATIENCE_S)
    assert [tickets.claim(0, 0), tickets.claim(1, 0)] == [0, 1]
    assert tickets.claim(0, 0) is None
    assert tickets.claim(0, 1) == 2
    assert tickets.claim(1, 0) is None  # it is late, and there is nothing left for it


def test_what_is_left_of_a_step_that_all_have_left_is_not_handed_out() -> None:
    tickets = Tickets(3, Reads(None), PATIENCE_S)
    tickets.next = 4  # of step 1 one part is gone, and then workers were lost
    assert tickets.claim(0, 2) == 6


def test_whoever_skips_a_step_without_a_push_gets_the_next_one_and_holds_nobody_up() -> None:
    tickets = Tickets(1, Reads(0), PATIENCE_S)
    assert tickets.claim(0, 0) == 0  # the loss is NaN
    assert tickets.claim(0, 1) == 1
    waits = Waiter(tickets, 1, 2)
    assert tickets.claim(0, 3) == 3  # its part of step 1 is skipped, and so is step 2, which was handed to nobody
    assert waits.result() is None


def test_whoever_skips_the_last_step_wakes_those_who_wait_for_it() -> None:
    tickets = Tickets(1, Reads(0), PATIENCE_S)
    assert tickets.claim(0, 0) == 0
    waits = Waiter(tickets, 1, 1)
    assert tickets.claim(0, 0) is None
    assert waits.result() == 1


def test_whoever_waits_for_a_turn_wakes_when_the_workers_part() -> None:
    tickets = Tickets(1, Reads(0), PATIENCE_S)
    assert tickets.claim(0, 0) == 0
    waits = Waiter(tickets, 1, 1)
    tickets.end()
    with pytest.raises(WorkerLost, match="waited for their turn"):
        waits.result()
    with pytest.raises(WorkerLost):
        tickets.claim(2, 1)


def test_whoever_only_goes_along_waits_until_a_step_is_taken() -> None:
    tickets = Tickets(2, Reads(None), timeout_s=0.1)
    for worker in (0, 1):
        with pytest.raises(NoProgress, match="rank 2 waited for its turn in vain, which comes after"):
            tickets.taken(2, 0)
        assert tickets.claim(worker, 0) == worker
    tickets.taken(2, 0)
    with ThreadPoolExecutor(1) as pool:
        patient = Tickets(2, Reads(None), PATIENCE_S)
        waits = pool.submit(patient.taken, 2, 0)
        assert [patient.claim(0, 0), patient.claim(1, 0)] == [0, 1]
        waits.result(PATIENCE_S)


def test_whoever_waits_for_a_worker_that_does_not_come_back_says_for_which() -> None:
    tickets = Tickets(1, Reads(1), timeout_s=0.1)
    assert [tickets.claim(1, 0), tickets.claim(2, 1)] == [0, 1]
    tickets.push(1)
    words = "rank 0 waited for its turn in vain, which comes after rank 1, rank 2. It hangs.*failure_timeout_s"
    with pytest.raises(NoProgress, match=words):
        tickets.claim(0, 2)
    tickets.arrived(1)
    assert tickets.claim(0, 2) == 2
    with pytest.raises(NoProgress, match="which comes after rank 2"):
        tickets.push(0)


class Waiter:
    """A worker that waits for a ticket on a thread of its own."""

    def __init__(self, tickets: Tickets, worker: int, step: int) -> None:
        self._found: Future[int | None] = Future()
        self._thread = threading.Thread(target=self._claim, args=(tickets, worker, step))
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not tickets._changed._waiters:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, "it does not wait"
            time.sleep(0.001)

    def result(self) -> int | None:
        with ExitStack() as ending:
            ending.callback(self._thread.join, PATIENCE_S)
            return self._found.result(PATIENCE_S)

    def _claim(self, tickets: Tickets, worker: int, step: int) -> None:
        try:
            self._found.set_result(tickets.claim(worker, step))
        except WorkerLost as error:
            self._found.set_exception(error)
