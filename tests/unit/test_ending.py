"""Who hears SIGTERM, Ctrl-C, and notices of batch systems, while runs are open in a process and after."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import pytest

from unisono.host.process import resume_command
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


# -- Ctrl-C


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_script_at_once_until_its_first_step_begins() -> None:
    run = LeaveRequest()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    run.close()


def test_ctrl_c_in_a_loop_asks_to_leave_and_python_has_it_again_afterwards() -> None:
    run = LeaveRequest()
    run.catch_interrupts()
    interrupt()
    interrupt()  # the same one, by way of a launcher
    assert run.requested
    run.heed()
    run.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_once_more_ends_the_script_at_once() -> None:
    run = LeaveRequest()
    run.catch_interrupts()

    def ends() -> bool:
        interrupt()
        return False

    with pytest.raises(KeyboardInterrupt):
        _becomes_true(ends)
    run.close()


def test_ctrl_c_that_comes_too_late_to_leave_ends_the_script_when_the_run_is_closed() -> None:
    run = LeaveRequest()
    run.catch_interrupts()
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        run.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_runs_whose_steps_take_turns_close_and_python_has_ctrl_c_again(order: tuple[int, ...]) -> None:
    runs = [LeaveRequest(), LeaveRequest()]
    for number in (0, 1, 0, 1, 0):
        runs[number].catch_interrupts()
    interrupt()
    assert [run.requested for run in runs] == [True, False]
    for number in order:
        runs[number].heed()
        runs[number].close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_scripts_own_has_ctrl_c() -> None:
    own: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: own.append(number))
    try:
        run = LeaveRequest()
        run.catch_interrupts()
        interrupt()
        run.close()
        assert (own, run.requested) == ([signal.SIGINT], False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_who_has_no_launcher_of_ours_is_told_what_was_heard(capfd: pytest.CaptureFixture[str]) -> None:
    run = LeaveRequest(prints=True)
    run.catch_interrupts()
    interrupt()
    run.heed()
    run.close()
    assert capfd.readouterr().err.startswith("unisono: SIGINT: the workers leave after this step, with a checkpoint")


def test_the_command_that_goes_on_is_the_one_that_was_typed_with_the_run_folder() -> None:
    folder = Path("runs/a b").absolute()
    assert (
        resume_command(folder, ["python", "train.py", "--lr", "1"])
        == f"UNISONO_RUN_DIR='{folder}' python train.py --lr 1"
    )
    named = ["python", "-m", "unisono", "run", "--run-dir", "runs/a b", "train.py"]
    assert resume_command(folder, named) == "python -m unisono run --run-dir 'runs/a b' train.py"
    installed = ["/bin/python", "/nowhere/unisono", "run", "--run-dir=runs/a b", "train.py"]
    assert resume_command(folder, installed) == "/nowhere/unisono run '--run-dir=runs/a b' train.py"


def _becomes_true(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not is_so() and time.monotonic() < until:
        time.sleep(0.01)
    return is_so()
