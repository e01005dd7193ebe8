"""What latency and bandwidth say about topologies, against the formulas of the literature."""

from math import log2

import pytest

from unisono.plan.split import Split
from unisono.plan.topology import TOPOLOGIES, plan
from unisono_lab.simulation.simulated_training import Forecast, forecast

pytestmark = pytest.mark.unit

SIZE, LATENCY_S, BYTES_PER_S = 8e6, 1e-3, 125e6
FULL_S = SIZE / BYTES_PER_S
"""The whole bucket on its way from one worker to another."""


def forecast_of(topology: str, workers: int, pieces: int, latency_s: float = LATENCY_S) -> Forecast:
    return forecast(plan(Split.even(workers, workers), topology, pieces), SIZE, latency_s, BYTES_PER_S)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_direct_takes_two_rounds_and_moves_the_bytes_of_a_ring_all_reduce(workers: int) -> None:
    found = forecast_of("direct", workers, workers)
    assert found.seconds == pytest.approx(2 * LATENCY_S + 2 * (workers - 1) / workers * FULL_S)
    assert found.messages == 2 * workers * (workers - 1)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_a_ring_takes_two_rounds_for_each_other_worker_and_more_bytes_where_siblings_are_apart(workers: int) -> None:
    found, usual = forecast_of("ring", workers, workers), 2 * (workers - 1) * (LATENCY_S + FULL_S / workers)
    assert found.rounds == 2 * (workers - 1)
    assert (found.seconds == pytest.approx(usual)) == (workers == 2)
    assert usual - 1e-9 <= found.seconds < 2 * usual


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_a_tree_takes_twice_its_height_and_sends_the_whole_bucket_each_time(workers: int) -> None:
    found = forecast_of("tree", workers, 1)
    up, height = log2(workers) * (LATENCY_S + FULL_S), log2(workers)
    down = height * LATENCY_S + sum(range(1, int(height) + 1)) * FULL_S  # whoever stands high sends to several at once
    assert up + height * (LATENCY_S + FULL_S) <= found.seconds <= up + down + 1e-9
    assert found.messages == 2 * (workers - 1)


def test_in_a_star_everything_goes_through_one_connection_and_pieces_do_so_in_both_directions_at_once() -> None:
    whole, pieces = (forecast_of("star", 4, count, latency_s=0.0) for count in (1, 100))
    assert whole.seconds == pytest.approx(2 * 3 * FULL_S)
    assert pieces.seconds == pytest.approx(1.01 * 3 * FULL_S)
    assert whole.most_bytes == pieces.most_bytes == 3 * SIZE


def test_without_bandwidth_to_think_of_a_topology_costs_its_rounds() -> None:
    for topology, workers, rounds in (("direct", 8, 2), ("star", 8, 2), ("tree", 8, 6), ("ring", 8, 14)):
        found = forecast(plan(Split.even(8, workers), topology, 1), 1e-6, LATENCY_S, BYTES_PER_S)
        assert found.seconds == pytest.approx(rounds * LATENCY_S, rel=1e-6)
        assert found.rounds == rounds


def test_two_servers_take_half_as_long_as_one_where_bandwidth_counts() -> None:
    one, two = (
        forecast(plan(Split.even(8, 6).with_servers(count), "direct", count), SIZE, 0.0, BYTES_PER_S)
        for count in (1, 2)
    )
    assert one.most_bytes == 5 * SIZE
    assert two.most_bytes < 0.7 * one.most_bytes


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nothing_takes_no_time(topology: str) -> None:
    found = forecast(plan(Split.even(4, 4), topology, 0), 0.0, LATENCY_S, BYTES_PER_S)
    assert (found.rounds, found.messages, found.most_bytes, found.seconds) == (0, 0, 0.0, 0.0)
