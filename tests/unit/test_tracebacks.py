"""Tracebacks and warnings point at the lines of the script."""

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import LossError, UnisonoWarning, WorkerLost
from unisono.host.tracebacks import OURS, for_people, warn

pytestmark = pytest.mark.unit


def of_ours(code: str) -> dict[str, Any]:
    """What a file of the package defines that holds this code."""
    names: dict[str, Any] = {}
    exec(compile(code, f"{OURS[0]}train/anything.py", "exec"), names)  # noqa: S102
    return names


def test_a_fault_of_our_own_shows_all_lines() -> None:
    fault = of_ours("def outer(): inner()\ndef inner(): 1 / 0")
    with pytest.raises(ZeroDivisionError) as raised:
        fault["outer"]()
    assert for_people(raised.value).count(OURS[0]) == 2


def test_an_error_that_only_adds_a_place_to_another_stands_alone() -> None:
    def refuse() -> None:
        try:
            raise LossError("it is a str")
        except LossError as error:
            raise LossError("step 3: it is a str") from error

    with pytest.raises(LossError) as raised:
        refuse()
    text = for_people(raised.value)
    assert text.endswith("LossError: step 3: it is a str\n")
    assert text.count("LossError: ") == 1


def test_how_a_socket_told_that_a_worker_is_gone_is_left_out() -> None:
    def lose() -> None:
        try:
            raise BrokenPipeError("Broken pipe")
        except OSError as error:
            raise WorkerLost("rank 0 lost rank 1") from error

    with pytest.raises(WorkerLost) as raised:
        lose()
    assert "BrokenPipeError" not in for_people(raised.value)


def test_a_warning_points_at_the_scripts_line_and_at_none_from_a_thread_of_ours(tmp_path: Path) -> None:
    tell = of_ours("def tell(warn): warn('odd')")["tell"]
    script = tmp_path / "mine.py"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exec(compile("\n\ntell(warn)\n", str(script), "exec"), {"tell": tell, "warn": warn})  # noqa: S102
        thread = threading.Thread(target=tell, args=(warn,))
        thread.start()
        thread.join()
        warnings.simplefilter("default")
        for _ in range(2):
            thread = threading.Thread(target=tell, args=(warn,))
            thread.start()
            thread.join()
    places = [(Path(each.filename).name, each.lineno, each.category) for each in seen]
    of_threads = [("unisono", 0, UnisonoWarning)] * 2  # as Python's filter is by default the same comes once
    assert places == [("mine.py", 3, UnisonoWarning), *of_threads]
