"""By default buckets are reduced beside the backward pass where that saves time."""

import pytest

from unisono.host.machine import CgroupLimits, cores_within
from unisono.plan.split import Split
from unisono.reduce.transport import Solo
from unisono.train.config.run_config import Execution

pytestmark = pytest.mark.unit


class Waiting(Solo):
    """A transport of so many workers that mostly waits."""

    def __init__(self, workers: int) -> None:
        super().__init__(8)
        self.split = Split.even(8, workers)


class Busy(Waiting):
    """A transport that keeps a core busy."""

    needs_core = True


def test_waiting_for_a_network_is_always_done_beside_the_backward_pass() -> None:
    assert Execution().overlaps(Waiting(2), threads=1, cores=lambda: 2)


@pytest.mark.parametrize(("usable", "threads"), [(2, 1), (4, 2), (3, 1), (1, 1)])
def test_additions_come_after_the_backward_pass_where_threads_keep_all_cores_busy(usable: int, threads: int) -> None:
    assert not Execution().overlaps(Busy(2), threads, lambda: usable)


@pytest.mark.parametrize(("usable", "threads"), [(4, 1), (6, 2)])
def test_additions_run_beside_it_where_each_worker_has_a_core_to_spare(usable: int, threads: int) -> None:
    assert Execution().overlaps(Busy(2), threads, lambda: usable)


@pytest.mark.parametrize("overlap", [True, False])
def test_whoever_says_what_they_want_gets_it(overlap: bool) -> None:
    assert Execution(overlap=overlap).overlaps(Busy(2), threads=1) is overlap
    assert Execution(overlap=overlap).overlaps(Waiting(2), threads=1) is overlap


@pytest.mark.parametrize(("limit", "usable"), [(None, 8), (2.5, 2), (0.5, 1), (64.0, 8)])
def test_a_control_group_that_allows_less_than_there_are_cores_counts(limit: float | None, usable: int) -> None:
    assert cores_within(CgroupLimits(cpus=limit), 8) == usable
