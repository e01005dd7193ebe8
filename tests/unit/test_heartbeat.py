from types import SimpleNamespace
from typing import Any

import pytest

from unisono.train.group.liveness import Heartbeat

pytestmark = pytest.mark.unit


class Watched:
    """A main thread that does what the test says, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.workers: Any = SimpleNamespace(generation=SimpleNamespace(number=1), ticks=0, is_called=False, waits=False)
        self.heart = Heartbeat(lambda progress: None, lambda: self.workers, lambda: self.now)

    def after(self, seconds: float, *, ticks: int = 0, called: bool = False, waits: bool = False) -> Any:
        self.now += seconds
        self.workers.ticks += ticks
        self.workers.is_called, self.workers.waits = called, waits
        return self.heart.look()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_thread_stands_still_as_long_as_nothing_of_it_changes(watched: Watched) -> None:
    watched.after(1.0, called=True, ticks=1)
    assert watched.after(4.0, called=True).still_s == pytest.approx(4.0)
    assert watched.after(1.0, called=True).still_s == pytest.approx(5.0)
    assert watched.after(1.0, called=True, ticks=1).still_s == 0.0


def test_what_it_did_longest_is_remembered_but_not_how_long_it_waited_or_was_in_the_script(watched: Watched) -> None:
    watched.after(1.0, called=True, ticks=1)
    watched.after(3.0, called=True)
    assert watched.after(1.0, called=True, ticks=1).longest_s == pytest.approx(4.0)
    assert watched.after(60.0, called=True, waits=True).longest_s == pytest.approx(4.0)
    watched.after(1.0)
    assert watched.after(90.0, ticks=1).longest_s == pytest.approx(4.0)
    assert watched.after(1.0, called=True, ticks=1).longest_s == pytest.approx(4.0)


def test_who_waits_does_not_stand_still(watched: Watched) -> None:
    watched.after(1.0, called=True, ticks=1)
    waiting = watched.after(50.0, called=True, waits=True)
    assert (waiting.doing, waiting.still_s) == ("wait", 0.0)
    watched.heart.forms = True
    assert watched.after(1.0).doing == "wait"
