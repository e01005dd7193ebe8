"""By default buckets are reduced beside the backward pass where that saves time."""

import os

import pytest

from unisono.membership import cores
from unisono.membership.cgroup import Limits
from unisono.membership.environment import Environment
from unisono.membership.generation import Generation
from unisono.plan.split import Split
from unisono.reduce.transport import Solo
from unisono.train import start
from unisono.train.workers import Workers

pytestmark = pytest.mark.unit


class Busy(Solo):
    """A transport that keeps a core busy."""

    needs_core = True


def pays(monkeypatch: pytest.MonkeyPatch, transport: Solo, *, cores: int, workers: int, threads: int) -> bool:
    monkeypatch.setattr(start, "usable_cores", lambda: cores)
    environment = Environment(
        "unisono", rank=0, world_size=workers, local_rank=0, local_world_size=workers, host="here"
    )
    return start._overlap_pays(Workers(Generation(1, 0, Split.even(8, 1)), transport), environment, threads)


def test_waiting_for_a_network_is_always_done_beside_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pays(monkeypatch, Solo(8), cores=2, workers=2, threads=1)


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (4, 2), (3, 1), (1, 1)])
def test_additions_come_after_the_backward_pass_where_threads_keep_all_cores_busy(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    assert not pays(monkeypatch, Busy(8), cores=cores, workers=2, threads=threads)


@pytest.mark.parametrize(("cores", "threads"), [(4, 1), (6, 2)])
def test_additions_run_beside_it_where_each_worker_has_a_core_to_spare(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    assert pays(monkeypatch, Busy(8), cores=cores, workers=2, threads=threads)


def test_a_control_group_that_allows_less_than_there_are_cores_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for limit, usable in ((None, 8), (2.5, 2), (0.5, 1), (64.0, 8)):
        monkeypatch.setattr(cores, "read_limits", lambda limit=limit: Limits(cpus=limit))
        assert cores.usable_cores() == usable
