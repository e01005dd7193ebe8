"""Who serves and who computes, by the strategy."""

import pytest

from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.transport import Solo
from unisono.sync import AllReduce, Strategy
from unisono.train.group.workers import Workers
from unisono.train.step.current import serve
from unisono_lab.strategies.parameter_server import ParameterServer

pytestmark = pytest.mark.unit


class Told(Solo):
    """Remembers which way it was told to take."""

    is_direct = False

    def go_direct(self, *, always: bool) -> None:
        self.is_direct = always


def workers_of(count: int) -> Workers:
    return Workers(Generation(1, 0, Split.even(8, count)), Told(8))


def test_with_servers_the_highest_ranks_compute_nothing_whatever_batches_are_cut_into() -> None:
    workers = workers_of(3)
    assert serve(workers, ParameterServer(servers=1))
    assert workers.split(8).bounds == (0, 4, 8, 8)
    assert workers.split(24).bounds == (0, 12, 24, 24)


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), ParameterServer(synchronous=False, servers=1)])
def test_with_any_other_strategy_all_compute(strategy: Strategy) -> None:
    workers = workers_of(3)
    serve(workers, ParameterServer(servers=1))
    assert serve(workers, strategy)
    assert workers.split(8) == Split.even(8, 3)


def test_where_every_worker_serves_a_share_they_send_to_each_other_directly() -> None:
    workers, ways = workers_of(2), []
    for strategy in (AllReduce(), ParameterServer(), ParameterServer(servers=1), ParameterServer(), AllReduce()):
        serve(workers, strategy)
        assert isinstance(workers.transport, Told)
        ways.append(workers.transport.is_direct)
    assert ways == [False, True, False, True, False]


@pytest.mark.parametrize("count", [1, 2])
def test_with_too_few_workers_all_compute_and_that_is_said(count: int) -> None:
    workers = workers_of(count)
    assert not serve(workers, ParameterServer(servers=2))
    assert workers.split(8) == Split.even(8, count)
