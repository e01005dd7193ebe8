"""Who hears SIGTERM, and notices of batch systems, while runs are open in a process and after."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import permutations

import pytest

from unisono.train.state.ending import LeaveRequest

pytestmark = pytest.mark.unit


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What the script's own handler hears."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_runs_that_close_in_any_order_leave_the_scripts_handler(order: tuple[int, ...], heard: list[int]) -> None:
    runs = [LeaveRequest() for _ in range(3)]
    for number in order:
        runs[number].close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_a_run_that_is_closed_hands_the_signal_on_if_somebody_puts_its_handler_back(heard: list[int]) -> None:
    run = LeaveRequest()
    theirs = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run.close()
    signal.signal(signal.SIGTERM, theirs)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (heard, run.requested) == ([signal.SIGTERM], False)


def test_a_run_that_is_open_hears_the_signal_after_others_are_closed(heard: list[int]) -> None:
    first, second = LeaveRequest(), LeaveRequest()
    first.close()
    os.kill(os.getpid(), signal.SIGTERM)
    second.close()
    assert (heard, first.requested, second.requested) == ([signal.SIGTERM], False, True)


def test_what_a_run_has_heard_is_told_to_the_scripts_handler_when_it_closes(heard: list[int]) -> None:
    run = LeaveRequest()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (heard, run.requested) == ([], True)
    run.close()
    assert heard == [signal.SIGTERM]
    run.close()
    assert heard == [signal.SIGTERM]


def test_a_notice_asks_to_leave_once_it_has_had_time_to_reach_the_others_and_never_kills() -> None:
    told: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: told.append(number))
    try:
        run = LeaveRequest((signal.SIGUSR2,))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
        assert not run.requested
        assert _becomes_true(lambda: run.requested)
        run.close()
        assert told == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_notice_that_nobody_handled_before_is_forgotten_when_the_run_closes() -> None:
    run = LeaveRequest((signal.SIGUSR1,))
    os.kill(os.getpid(), signal.SIGUSR1)
    run.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_notice_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        run = LeaveRequest((signal.SIGUSR1,))
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        run.close()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _becomes_true(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not is_so() and time.monotonic() < until:
        time.sleep(0.01)
    return is_so()
