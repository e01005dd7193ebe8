"""Buckets are reduced in the order of their plan, beside the caller, and whatever fails wakes whoever waits."""

import threading
from collections.abc import Hashable, Sequence

import pytest
import torch
from torch import Tensor

from unisono.errors import WorkerLost
from unisono.plan.split import Split
from unisono.reduce.partial_sums import UNTALLIED, Tally
from unisono.reduce.reducer import Reducer
from unisono.reduce.transport import Solo

pytestmark = pytest.mark.unit


class Recorded(Solo):
    """A transport that says it has two workers, and notes in which order buckets come."""

    def __init__(self) -> None:
        super().__init__(2)
        self.split = Split.even(2, 2)
        self.reduced: list[Hashable] = []
        self.threads: set[str] = set()
        self.first = threading.Event()
        self.hung_up = threading.Event()
        self.silent: Hashable = None

    def reduce(
        self,
        bucket: Hashable,
        partials: Sequence[Tensor],
        divisor: float | None = None,
        tally: Tally = UNTALLIED,
    ) -> Tensor:
        self.reduced.append(bucket)
        self.threads.add(threading.current_thread().name)
        self.first.set()
        if bucket == self.silent:
            self.hung_up.wait()
            raise WorkerLost("rank 1 is gone")
        return super().reduce(bucket, partials, divisor, tally)

    def close(self) -> None:
        self.hung_up.set()


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_are_reduced_in_the_order_of_the_plan_whatever_order_they_come_in(overlap: bool) -> None:
    transport = Recorded()
    reducer = Reducer(transport, "exact", overlap=overlap)
    for _ in range(2):
        reducer.begin(["a", "b", "c"], lambda: 2.0)
        for bucket in (2, 0, 1):
            reducer.ready(bucket, [torch.full((64,), float(bucket))])
        totals, _ = reducer.totals()
        assert [total[0].item() for total in totals] == [0.0, 0.5, 1.0]
    reducer.close()
    assert transport.reduced == ["a", "b", "c"] * 2
    assert transport.threads == {"unisono-reducer" if overlap else threading.current_thread().name}


def test_a_bucket_is_reduced_before_the_next_one_is_ready() -> None:
    transport = Recorded()
    reducer = Reducer(transport, "exact", overlap=True)
    reducer.begin(["a", "b"], lambda: None)
    reducer.ready(0, [torch.zeros(64)])
    assert transport.first.wait(timeout=30)
    reducer.ready(1, [torch.zeros(64)])
    assert len(reducer.totals()[0]) == 2
    reducer.close()


def test_without_overlap_nothing_is_reduced_before_it_is_asked_for() -> None:
    transport = Recorded()
    reducer = Reducer(transport, "exact", overlap=False)
    reducer.begin(["a"], lambda: None)
    reducer.ready(0, [torch.zeros(64)])
    assert transport.reduced == []
    reducer.totals()
    assert transport.reduced == ["a"]


@pytest.mark.parametrize("overlap", [True, False])
def test_what_goes_wrong_in_the_background_is_raised_where_somebody_waits(overlap: bool) -> None:
    def weigh() -> float:
        raise WorkerLost("rank 1 is gone")

    reducer = Reducer(Recorded(), "exact", overlap=overlap)
    reducer.begin(["a"], weigh)
    with pytest.raises(WorkerLost, match="rank 1 is gone"):
        reducer.totals()
    reducer.begin(["a"], lambda: None)  # the next attempt starts afresh
    reducer.ready(0, [torch.zeros(64)])
    assert len(reducer.totals()[0]) == 1
    reducer.close()


@pytest.mark.parametrize("silent", ["a", None])
def test_an_attempt_that_is_abandoned_hangs_up_on_the_others_and_leaves_no_thread(silent: str | None) -> None:
    transport = Recorded()
    transport.silent = silent
    reducer = Reducer(transport, "exact", overlap=True)
    reducer.begin(["a", "b"], lambda: None)
    reducer.ready(0, [torch.zeros(64)])
    transport.first.wait(timeout=30)
    reducer.abandon()
    assert transport.hung_up.is_set()
    reducer.close()
    assert "unisono-reducer" not in {thread.name for thread in threading.enumerate()}


def test_a_single_worker_needs_no_thread() -> None:
    reducer = Reducer(Solo(2), "exact", overlap=True)
    reducer.begin(["a"], lambda: 4.0)
    reducer.ready(0, [torch.full((64,), 2.0)])
    (total,), _ = reducer.totals()
    assert total[0].item() == 0.5
    assert "unisono-reducer" not in {thread.name for thread in threading.enumerate()}
    reducer.close()
