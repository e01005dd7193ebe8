"""Who has SIGTERM when several runs are open in one process."""

import os
import signal
from collections.abc import Iterator
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
    assert (heard, first.requested, second.requested) == ([], False, True)
