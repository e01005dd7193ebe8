"""What the simulated market gives: hosts that come and go, prices, and traces that are wrong."""

import math
import os
from itertools import pairwise
from pathlib import Path

import pytest

from examples.simulation.generate_trace import arguments, main
from unisono.adapt.layouts import StepTime
from unisono.errors import JobError
from unisono_lab.simulation.market import MarketTrace, Supply, supply
from unisono_lab.simulation.scenario import Durations, HostKind, JobSpec, Scenario, Workload
from unisono_lab.simulation.simulated_run import simulate

pytestmark = pytest.mark.unit

TRACE = Path(__file__).parents[2] / "examples" / "simulation" / "generated-trace.csv"
HEAD = "start,end,available,price_per_hour,zone\n"
SPOT = HostKind(name="spot", count=4, workers=2, price=1.0, between_losses_s=1000.0, zones=2)


def read(folder: Path, text: str) -> MarketTrace:
    path = folder / "trace.csv"
    path.write_text(text)
    return MarketTrace.read(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("begin,end,available\n", "line 1, column 1: 'begin' belongs to no trace"),
        ("start,end,available,end\n", "line 1, column 4: 'end' occurs twice"),
        ("start;end;available\n", "line 1, column 1: 'start;end;available' .* with commas"),
        ("start,end\n", "line 1: a column is missing: available"),
        (HEAD, "has no rows"),
        (HEAD + "0,60,2,1.0\n", "line 2: it has more or fewer fields than the first line"),
        (HEAD + "0,60,2,-1.0,a\n", "line 2, column price_per_hour: '-1.0': it is no price"),
        (HEAD + "0,60,2,nan,a\n", "line 2, column price_per_hour"),
        (HEAD + "0,60,1_0,1.0,a\n", "line 2, column available: '1_0'"),
        (HEAD + "0,60,2,1.0,a\n9,60,2,1.0,b\n", "line 3, column start: another zone begins at another time, in line 2"),
        (HEAD + "-1e308,1e308,2,1.0,a\n", "line 2, column start"),
        (HEAD + "0,60,2,$1.0,a\n", "line 2, column price_per_hour: '.1.0': .* without a currency"),
        (HEAD + "0,60,2,1.0,a\n60,70,2,,a\n", "line 3, column price_per_hour: it is empty, but others have a price"),
        (HEAD + "0,60,2.5,1.0,a\n", "line 2, column available"),
        (HEAD + f"0,60,{'9' * 1500},1.0,a\n", "line 2, column available"),
        (HEAD + "0,60,2,1.0,a\n60,50,2,1.0,a\n", "line 3, column end: it is not after the start"),
        (HEAD + "0,60,2,1.0,a\n70,90,2,1.0,a\n", "line 3, column start: it leaves a gap behind line 2, by 10"),
        (HEAD + "0,60,2,1.0,a\n50,90,2,1.0,a\n", "line 3, column start: it overlaps line 2, by 10 s"),
        (HEAD + "0,60,2,1.0,a\n0,90,2,1.0,b\n", "line 3, column end: another zone ends at another time, in line 2"),
        (HEAD + "2026-01-31T12:00:00,90,2,1.0,a\n", "line 2, column start: .* has no offset from UTC"),
        (HEAD + "1767225600000,1767225660000,2,1.0,a\n", "line 2, column start: .* not milliseconds"),
        (HEAD + "inf,90,2,1.0,a\n", "line 2, column start"),
        (HEAD + "".join(f"0,60,2,1.0,z{zone}\n" for zone in range(1001)), "has 1001 zones: 1000 are the most"),
        (HEAD + '0,60,2,1.0,"a\n60,90,2,1.0,a\n', "cannot be read behind line 0: unexpected end"),
        (HEAD + "0,1e-300,2,1.0,a\n", "covers 1e-300 s"),  # which would be read again for ever
        (HEAD + "0,60,2,1.0,a\n" + "\n" * 10**6 + "60,90,2,1.0,a\n", "line 1000001: a trace has 1000000 lines at most"),
    ],
)
def test_a_wrong_trace_is_refused_by_line_and_column(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        read(tmp_path, text)


def test_text_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes(HEAD.encode() + b"0,60,2,1.0,Z\xfcrich\n")
    with pytest.raises(JobError, match="cannot be read behind line 0: 'utf-8' codec"):
        MarketTrace.read(tmp_path / "trace.csv")


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + HEAD + "0,60,2,1.0,a\n60,90,1,2.0,a\n",
        HEAD.replace("\n", "\r\n") + "0,60,2,1.0,a\r\n60,90,1,2.0,a\r\n",
        '"start","end","available","price_per_hour","zone"\n"0","60","2","1.0","a"\n"60","90","1","2.0","a"\n',
        HEAD + "0, 60, 2, 1.0, a\n60,90,1,2.0,a \n\n",
    ],
    ids=["byte order mark", "carriage returns", "quotes", "blanks"],
)
def test_what_spreadsheets_write_around_values_is_read(tmp_path: Path, text: str) -> None:
    trace = read(tmp_path, text)
    assert [(row.start, row.end, row.available, row.price, row.zone) for row in trace.rows] == [
        (0, 60, 2, 1.0, "a"),
        (60, 90, 1, 2.0, "a"),
    ]


def spot_hosts(trace: MarketTrace, count: int = 9, until_s: float = 50.0) -> Supply:
    return trace.supply(HostKind(name="spot", count=count, workers=1, trace=Path("trace.csv")), 0.0, until_s)


def zones(found: Supply) -> list[list[tuple[str, float, float]]]:
    return [[(stay.zone, stay.start, stay.end) for stay in host] for host in found.stays]


def test_a_host_costs_the_price_of_its_own_zone(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD + "0,50,1,1.0,a\n50,100,1,4.0,a\n0,100,1,2.0,b\n")
    found = spot_hosts(trace, until_s=99.0)
    assert zones(found)[:2] == [[("a", 0, math.inf)], [("b", 0, math.inf)]]
    costs = [found.prices[stay.zone].cost(0.0, 100.0) * 3600 for host in found.stays for stay in host]
    assert costs == pytest.approx([50 * 1.0 + 50 * 4.0, 100 * 2.0])
    kind = HostKind(name="spot", count=2, workers=1, boot_s=0, trace=tmp_path / "trace.csv", trace_from_s=0)
    work, took = Workload(samples=99_000, batch_size=100, shards=2), Durations(jitter=0)
    scenario = Scenario(work, StepTime(0.1, 0.0, 0.0, 0.0, 1.0), took, [kind], JobSpec())
    outcome = simulate(scenario, 0, 1e6, {"spot": trace})
    assert outcome.seconds > 100
    here = trace.supply(kind, 0.0, 1e6).prices
    assert outcome.cost == pytest.approx(sum(here[zone].cost(0.0, outcome.seconds) for zone in "ab"))


def test_hosts_come_in_the_cheapest_zone_with_room_and_the_last_one_goes_first(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD + "0,20,2,3.0,a\n20,100,0,3.0,a\n0,10,1,1.0,b\n10,100,2,1.0,b\n0,100,5,5.0,c\n")
    assert zones(spot_hosts(trace, count=3)) == [
        [("b", 0, math.inf)],
        [("a", 0, 20), ("b", 20, math.inf)],
        [("a", 0, 20), ("c", 20, math.inf)],
    ]


def test_without_a_host_that_is_there_a_kind_has_the_price_of_its_cheapest_zone(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD + "0,100,0,3.0,a\n0,50,0,2.0,b\n50,100,0,4.0,b\n")
    found = spot_hosts(trace, until_s=99.0)
    assert [found.lowest(moment) for moment in (0, 49, 50)] == [2.0, 2.0, 3.0]


def test_a_pipe_in_place_of_a_trace_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.csv")
    with pytest.raises(JobError, match="is no file"):
        MarketTrace.read(tmp_path / "trace.csv")


def test_a_trace_gives_as_many_hosts_as_it_says_and_goes_on_at_its_beginning(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD + "0,60,2,1.0,a\n60,100,0,3.0,a\n")
    kind = HostKind(name="spot", count=3, workers=1, trace=tmp_path / "trace.csv")
    found = trace.supply(kind, 0.0, 150.0)
    assert [[(stay.start, stay.end) for stay in host] for host in found.stays[:2]] == [
        [(0, 60), (100, float("inf"))]
    ] * 2
    assert list(found.stays[2]) == []
    assert [found.prices["a"].at(moment) for moment in (0, 59, 60, 100)] == [1.0, 1.0, 3.0, 1.0]


def test_times_with_offsets_from_utc_mean_one_moment_wherever_they_were_written(tmp_path: Path) -> None:
    there = "2026-01-31T12:00:00+01:00,2026-01-31T13:00:00+01:00,2,1.0,a\n"
    here = "2026-01-31T12:00:00+00:00,2026-01-31T14:00:00+00:00,1,1.0,a\n"
    trace = read(tmp_path, HEAD + there + here)
    assert [(row.start, row.end) for row in trace.rows] == [(0, 3600), (3600, 10800)]


@pytest.mark.parametrize("is_traced", [False, True], ids=["drawn", "traced"])
def test_what_comes_first_does_not_depend_on_how_far_the_market_is_drawn(tmp_path: Path, is_traced: bool) -> None:
    trace = read(tmp_path, HEAD + "0,60,2,1.0,a\n60,100,0,3.0,a\n0,30,1,2.0,b\n30,100,3,0.5,b\n") if is_traced else None
    near, far = (supply(SPOT, "7", until_s, trace) for until_s in (3000.0, 9000.0))

    def before(found: Supply) -> list[list[tuple[float, float]]]:
        return [[(stay.start, min(3000.0, stay.end)) for stay in host if stay.start < 3000.0] for host in found.stays]

    assert before(near) == before(far)
    assert near.stays != far.stays
    assert all(near.prices[zone].at(at) == far.prices[zone].at(at) for zone in near.prices for at in range(0, 3000, 7))


def test_the_price_over_time_follows_the_market_also_while_the_workers_stay_the_same(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD + "0,50,1,1.0,a\n50,9000,1,4.0,a\n0,70,9,2.0,b\n70,9000,9,3.0,b\n")
    kind = HostKind(name="spot", count=1, workers=2, boot_s=0, trace=tmp_path / "trace.csv", trace_from_s=0)
    work, took = Workload(samples=10_000, batch_size=100, shards=2), Durations(start_s=0, form_s=0.5, jitter=0)
    outcome = simulate(
        Scenario(work, StepTime(1.0, 0.0, 0.0, 0.0, 1.0), took, [kind], JobSpec()), 0, 1e6, {"spot": trace}
    )
    assert [(mark.seconds, mark.workers, mark.price) for mark in outcome.marks] == [
        (0.5, 2, 0.5),
        (50.0, 2, 2.0),
        (100.5, 0, 2.0),
    ]


def test_a_job_is_done_in_a_market_that_changes_each_second_as_if_it_were_drawn_to_the_end(tmp_path: Path) -> None:
    trace = read(tmp_path, "start,end,available,price_per_hour\n0,1,2,1.0\n1,2,2,2.0\n")
    kind = HostKind(name="spot", count=2, workers=1, trace=tmp_path / "trace.csv", trace_from_s=0)
    work = Workload(samples=99_000, batch_size=100, shards=2)
    job = Scenario(work, StepTime(0.1, 0.0, 0.0, 0.0, 1.0), Durations(jitter=0), [kind], JobSpec())
    near, far = (simulate(job, 0, until_s, {"spot": trace}) for until_s in (1e3, 1e12))
    assert near == far
    assert near.cost == pytest.approx(2 * 1.5 * near.seconds / 3600, rel=0.01)


def test_the_same_seed_draws_the_same_market_and_another_one_another() -> None:
    assert supply(SPOT, "1", 1e5) == supply(SPOT, "1", 1e5)
    assert supply(SPOT, "1", 1e5) != supply(SPOT, "2", 1e5)


def test_a_whole_zone_goes_at_once_as_often_as_the_kind_says() -> None:
    def together(kind: HostKind) -> set[int]:
        """How many hosts go at one moment."""
        ends = [stay.end for host in supply(kind, "0", 1e6).stays for stay in host if stay.end < 1e6]
        return {ends.count(end) for end in ends}

    always = SPOT.model_copy(update={"whole_zone": 1.0, "away_s": 0.0})
    assert together(always) == {2}
    assert together(always.model_copy(update={"whole_zone": 0.0})) == {1}


def test_hosts_come_back_and_are_never_there_twice() -> None:
    for host in supply(SPOT, "3", 1e6).stays:
        assert len(host) > 10
        assert all(before.end <= after.start for before, after in pairwise(host))


def test_the_shipped_trace_is_what_its_command_generates_and_says_that_it_is_generated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(arguments.parse_args(["--seed", "0"]))
    assert capsys.readouterr().out == TRACE.read_text()
    main(arguments.parse_args(["--seed", "1"]))
    assert capsys.readouterr().out != TRACE.read_text()
    assert {row.zone for row in MarketTrace.read(TRACE).rows} == {"generated-0", "generated-1"}
