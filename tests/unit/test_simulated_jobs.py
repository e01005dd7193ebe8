"""Jobs in virtual time: their time adds up, and what the coordinator decides is what it decides in a job."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.adapt.layouts import Layout, StepTime
from unisono.errors import JobError
from unisono_lab.simulation.market import MarketTrace
from unisono_lab.simulation.scenario import (
    Durations,
    HostKind,
    Incident,
    JobSpec,
    Scenario,
    Workload,
    read_scenario,
)
from unisono_lab.simulation.simulated_run import OutcomeCache, Request, SimulatedOutcome, outcomes, simulate

pytestmark = pytest.mark.unit

STEP = StepTime(a_c=0.5, b_c=0.0, a_r=0.1, b_r=0.0, gamma=1.0)
TOOK = Durations(start_s=20.0, form_s=0.5, copy_s=2.0, detect_s=0.1, checkpoint_s=5.0, stall_s=0.0, jitter=0.0)
STEADY = HostKind(name="steady", count=2, workers=2, price=3.6, boot_s=10.0)
PLAIN = Scenario(Workload(samples=8000, batch_size=8, shards=4), STEP, TOOK, [STEADY], JobSpec())
LONG_S = 50_000.0


def spot(folder: Path, *stays: str, **more: Any) -> HostKind:
    """Hosts that are there as a trace says: from, until, and how many."""
    trace = folder / "trace.csv"
    trace.write_text("start,end,available\n" + "".join(f"{stay}\n" for stay in stays))
    usual = {"count": 2, "workers": 2, "boot_s": 0.0, "trace": trace, "trace_from_s": 0.0}
    return HostKind(name="spot", **{**usual, **more})


def played(scenario: Scenario, until_s: float = LONG_S) -> SimulatedOutcome:
    traces = {kind.name: MarketTrace.read(kind.trace) for kind in scenario.hosts if kind.trace is not None}
    return simulate(scenario, 0, until_s, traces)


def test_a_job_on_steady_hosts_takes_what_its_steps_take_and_costs_what_its_hosts_cost() -> None:
    found = played(PLAIN)
    step_s = STEP.seconds(Layout(4, 8, 4))
    start_s = STEADY.boot_s + TOOK.start_s + TOOK.form_s
    assert found.done
    assert found.steps == 1000
    assert found.seconds == pytest.approx(start_s + 1000 * step_s, rel=1e-3)
    assert found.cost == pytest.approx(2 * 3.6 * found.seconds / 3600, rel=1e-6)
    assert found.lost["start"] == pytest.approx(start_s, rel=1e-2)
    assert found.generations == 1


def test_all_time_is_training_or_lost_to_something() -> None:
    lossy = HostKind(name="spot", count=6, workers=2, price=1.0, between_losses_s=300.0, away_s=100.0, notice_s=30.0)
    job, lone = (
        JobSpec(checkpoint_every=50, failure_timeout_s=40.0),
        STEADY.model_copy(update={"count": 1, "workers": 1}),
    )
    losses = 0
    for seed in range(5):
        found = simulate(replace(PLAIN, hosts=[lone, lossy], job=job), seed, LONG_S)
        trained_s = found.seconds - sum(found.lost[part] for part in ("regroup", "waiting", "start"))
        assert found.done
        losses += found.losses
        assert 1000 * STEP.seconds(Layout(4, 8, 4)) <= trained_s + 1e-6
        assert found.worker_seconds <= 4 * trained_s + 1e-6
    assert losses > 0


@pytest.mark.slow
def test_the_same_seed_has_the_same_outcome_on_any_number_of_processes() -> None:
    cheap = HostKind(name="spot", count=4, workers=2, between_losses_s=200.0)
    scenario = replace(PLAIN, hosts=[cheap], seconds=TOOK.model_copy(update={"jitter": 0.1}))
    request = Request((scenario,), (0, 1, 2), LONG_S)
    assert outcomes(request, 1) == outcomes(request, 2)
    first = outcomes(request, 1)[0]
    assert len({each.seconds for each in first}) == 3


def test_outcomes_that_are_known_are_not_simulated_again_and_are_what_they_would_be() -> None:
    cheap = HostKind(name="spot", count=4, workers=2, between_losses_s=200.0)
    one = replace(PLAIN, hosts=[cheap])
    other = replace(one, job=JobSpec(checkpoint_every=50))
    known = OutcomeCache(first_seed=3, until_s=LONG_S, processes=1)
    first = known.of([one], 2)[0]
    found = known.of([other, replace(one, hosts=(cheap,))], 4)
    assert found == outcomes(Request((other, one), (3, 4, 5, 6), LONG_S), 1)
    assert all(again is before for again, before in zip(found[1], first, strict=False))
    assert known.of([one], 1) == [first[:1]]


def test_hosts_that_are_warned_leave_before_they_go_and_nothing_is_computed_twice(tmp_path: Path) -> None:
    warned = spot(tmp_path, "0,300,1", "300,900000,0", count=1, notice_s=60.0)
    found = played(replace(PLAIN, hosts=[STEADY, warned]))
    assert found.done
    assert found.lost["repeated"] == 0.0
    assert found.lost["regroup"] < 10.0


def test_hosts_that_vanish_are_given_up_after_the_failure_timeout(tmp_path: Path) -> None:
    vanishing = spot(tmp_path, "0,300,1", "300,900000,0", count=1)
    three = HostKind(name="steady", count=1, workers=2, boot_s=0.0)
    short, long = (
        played(replace(PLAIN, hosts=[three, vanishing], job=JobSpec(failure_timeout_s=seconds))).lost["regroup"]
        for seconds in (40.0, 400.0)
    )
    assert 20.0 < short < 80.0 + 10.0
    assert 200.0 < long < 440.0 + 10.0


def test_when_all_are_lost_the_job_goes_back_to_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    job = JobSpec(checkpoint_every=100, failure_timeout_s=40.0)
    found = played(replace(PLAIN, hosts=[spot(tmp_path, "0,301,2", "301,600,0", "600,900000,2")], job=job))
    assert found.done
    assert found.steps == 1000
    assert 0 < found.lost["repeated"] < 101 * STEP.seconds(Layout(4, 8, 4)) + TOOK.checkpoint_s
    assert found.lost["waiting"] > 200.0


def test_a_job_waits_until_its_first_host_is_there_and_starts_then(tmp_path: Path) -> None:
    found = played(replace(PLAIN, hosts=[spot(tmp_path, "0,300,0", "300,900000,2", boot_s=10.0)]))
    assert found.lost["waiting"] == pytest.approx(300.0)
    assert found.lost["start"] == pytest.approx(10.0 + TOOK.start_s + TOOK.form_s)


def test_a_job_that_all_leave_with_notice_goes_on_where_it_was(tmp_path: Path) -> None:
    warned = spot(tmp_path, "0,300,2", "300,600,0", "600,900000,2", notice_s=60.0)
    found = played(replace(PLAIN, hosts=[warned]))
    assert found.done
    assert found.lost["repeated"] == 0.0
    assert found.lost["waiting"] > 300.0


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_killed_worker_costs_its_step_and_is_replaced(rank: int) -> None:
    quiet, killed = played(PLAIN), played(replace(PLAIN, incidents=[Incident(at_s=200.0, kill=rank)]))
    assert killed.done
    assert killed.losses == 1
    assert killed.generations == 3
    assert 0 < killed.lost["repeated"] < STEP.seconds(Layout(3, 8, 4)) + 1e-9
    assert quiet.seconds < killed.seconds < quiet.seconds + 30.0


def test_the_policies_of_the_job_decide_in_virtual_time() -> None:
    cheap = HostKind(name="spot", count=2, workers=2, price=2.0, between_losses_s=1e9)
    job = JobSpec(policies=("spot",), spot_budget=2.0, ask_every_s=0.0)
    found = played(replace(PLAIN, hosts=[cheap], job=job))
    assert {2, 4} <= {mark.workers for mark in found.marks}, "two workers for 1.0 each are what the budget pays"


def test_shards_are_split_by_speed_where_a_policy_asks_for_it() -> None:
    step = StepTime(a_c=0.0, b_c=0.05, a_r=0.1, b_r=0.0, gamma=1.0)
    fast, slow = (
        STEADY.model_copy(update={"name": name, "count": 1, "workers": 1, "speed": speed})
        for name, speed in (("fast", 1.0), ("slow", 0.5))
    )
    mixed = Scenario(Workload(samples=120_000, batch_size=120, shards=12), step, TOOK, [fast, slow], JobSpec())
    even, split = played(mixed), played(replace(mixed, job=JobSpec(policies=("straggler",))))
    assert even.seconds == pytest.approx(1000 * (60 * 0.05 / 0.5 + 0.1), rel=0.02), "six shards of ten samples each"
    assert split.seconds == pytest.approx(1000 * (80 * 0.05 + 0.1), rel=0.1), "eight for the fast one"
    assert split.generations == 2


def test_a_job_that_loses_its_steps_again_and_again_is_given_up_before_all_its_time_has_passed(tmp_path: Path) -> None:
    hosts = [spot(tmp_path, "0,200,2", "200,300,0")]
    found = played(replace(PLAIN, hosts=hosts, job=JobSpec(failure_timeout_s=40.0)), until_s=1e9)
    assert not found.done
    assert found.steps < 1000
    assert found.seconds < 1e6


def test_a_policy_that_counts_steps_acts_as_it_does_in_a_job() -> None:
    work = Workload(samples=64_000, batch_size=64, shards=4, noise_scale=1000.0)
    found = played(replace(PLAIN, work=work, job=JobSpec(policies=("noise-scale",))))
    assert found.done
    assert found.steps < 500, "batches of 512 samples from step 150 on, each worth five of the first"


def test_policies_are_asked_now_and_then_however_seldom_they_are_to_be_asked() -> None:
    job = JobSpec(policies=("spot",), ask_every_s=1e9)
    work = Workload(samples=10**11, batch_size=1000, shards=4)
    quick = replace(PLAIN, work=work, step=replace(STEP, a_c=1e-6, a_r=0.0), job=job)
    assert simulate(replace(quick, work=work.model_copy(update={"samples": 10**9})), 0, LONG_S).done


SCENARIO = """
[work]
samples = 8000
batch_size = 8
shards = 4

[step]
a_c = 0.5

[[hosts]]
name = "steady"
count = 2
workers = 2
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("a_c = 0.5", "a_d = 0.5"), "step.a_d"),
        (("a_c = 0.5", "a_c = -0.5"), "step.a_c"),
        (("a_c = 0.5", ""), "does not give the time of a step"),
        (("shards = 4", "shards = 16"), "shards=16 is more than batch_size=8"),
        (("count = 2", "count = -2"), "hosts.0.count"),
        (("count = 2", "count = 2\nprice = nan"), "hosts.0.price"),
        (("count = 2", "counts = 2"), "hosts.0.count"),
        (("workers = 2", "workers = 2\n[job]\nfewest = 9"), "job.fewest is 9"),
        (("workers = 2", "workers = 2\n[job]\npolicies = 3"), "job.policies"),
        (("workers = 2", "workers = 2\n[[incidents]]\nat_s = 3.0"), "kill or resize"),
        (("[work]", "[work"), "is no TOML"),
        (("samples = 8000", "samples = 10_000_000_000"), "1.25e[+]09 steps: no more than 1e[+]08 are simulated"),
        (("samples = 8000", f"samples = {'9' * 5000}"), "is no TOML: .*digits"),
        (("samples = 8000", "samples = 2026-01-31"), "work.samples"),
        (("count = 2", "count = '2'"), "hosts.0.count"),
        (("count = 2", "count = 2\nspeed = inf"), "hosts.0.speed"),
        (("a_c = 0.5", "a_c = true"), "step.a_c"),
        (("a_c = 0.5", "a_c = 0"), "a step takes no time"),
        (("count = 2", "count = 1_000_000_000"), "hosts.0.count: Input should be less than or equal to 20000$"),
    ],
)
def test_a_wrong_scenario_is_refused_by_its_place(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(SCENARIO)
    read_scenario(path)
    path.write_text(SCENARIO.replace(*change, 1))
    with pytest.raises(JobError, match=words):
        read_scenario(path)


@pytest.mark.parametrize(
    "text",
    ["\ufeff" + SCENARIO, SCENARIO.replace("\n", "\r\n"), SCENARIO.replace("8000", "8e3").replace("0.5", "5e-1")],
    ids=["byte order mark", "carriage returns", "exponents"],
)
def test_a_scenario_is_what_it_says_however_it_was_written(tmp_path: Path, text: str) -> None:
    for name, written in (("plain", SCENARIO), ("other", text)):
        (tmp_path / name).write_bytes(written.encode())
    assert read_scenario(tmp_path / "plain") == read_scenario(tmp_path / "other")


def killed(**took: float) -> SimulatedOutcome:
    """A worker is killed after 100 s."""
    seconds = TOOK.model_copy(update=took)
    return played(replace(PLAIN, seconds=seconds, incidents=[Incident(at_s=100.0, kill=1)]))


def test_a_loss_costs_what_it_takes_to_notice_it() -> None:
    quick, slow = killed(detect_s=0.1), killed(detect_s=4.1)
    assert slow.lost["regroup"] - quick.lost["regroup"] == pytest.approx(4.0, abs=0.1)


def test_a_loss_is_noticed_when_the_step_that_it_breaks_off_would_have_ended() -> None:
    began_s = STEADY.boot_s + TOOK.start_s + TOOK.form_s
    step_s = STEP.seconds(Layout(4, 8, 4))
    seconds = TOOK.model_copy(update={"detect_s": 0.0})

    def lost_s(share: float) -> float:
        incident = Incident(at_s=began_s + (100 + share) * step_s, kill=1)
        return played(replace(PLAIN, seconds=seconds, incidents=[incident])).lost["regroup"]

    assert lost_s(0.1) - lost_s(0.9) == pytest.approx(0.8 * step_s, abs=1e-3)


def test_workers_that_a_host_starts_together_are_ready_one_after_the_other() -> None:
    apart, together = TOOK.model_copy(update={"start_each_s": 3.0}), TOOK
    host = STEADY.model_copy(update={"count": 1, "workers": 4})
    first = [played(replace(PLAIN, hosts=[host], seconds=took)).lost["start"] for took in (together, apart)]
    assert first[1] - first[0] == pytest.approx(3 * 3.0, abs=1e-3)  # the first generation waits for all
    grows = replace(PLAIN, hosts=[host], job=JobSpec(begin_with=2), incidents=[Incident(at_s=200.0, resize=4)])
    sizes = [[mark.workers for mark in played(replace(grows, seconds=took)).marks] for took in (together, apart)]
    assert sizes == [[2, 4, 0], [2, 3, 4, 0]]  # later ones are taken in as they come


def test_a_worker_on_a_host_that_has_started_some_before_comes_as_soon_as_that_takes() -> None:
    def back_s(found: SimulatedOutcome) -> float:
        return next(mark.seconds for mark in found.marks if mark.seconds > 101 and mark.workers == 4)

    quick, slow = killed(later_start_s=5.0), killed(later_start_s=45.0)
    longest_s = STEP.seconds(Layout(3, 8, 4))
    assert back_s(slow) - back_s(quick) == pytest.approx(40.0, abs=longest_s)
    assert killed(start_s=60.0).lost["start"] == pytest.approx(60.0 + STEADY.boot_s + TOOK.form_s, rel=1e-2)


def test_a_host_is_paid_as_long_as_its_workers_are_wanted() -> None:
    cheap = HostKind(name="spot", count=2, workers=2, price=2.0, between_losses_s=1e9)
    halved = replace(PLAIN, hosts=[cheap], incidents=[Incident(at_s=500.0, resize=2)])
    again = replace(halved, incidents=[*halved.incidents, Incident(at_s=800.0, resize=4)])
    for given, idle_s in ((halved, played(halved).seconds - 500), (again, 300)):
        found = played(given)
        assert found.cost == pytest.approx((2 * found.seconds - idle_s) * 2 / 3600, rel=0.01)


MANY = HostKind(
    name="spot", count=64, workers=1, price=1.0, notice_s=120.0, between_losses_s=1800.0, whole_zone=0.3, zones=2
)
"""Spot machines of which some are taken away each half hour, now and then all of a zone."""


@pytest.mark.parametrize("budget", [32.0, 40.0, 100.0])
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 34), marks=pytest.mark.slow)], ids=["some", "more"])
def test_the_policy_for_spot_machines_is_never_dearer_and_slower_than_none(seeds: range, budget: float) -> None:
    times = StepTime(a_c=0.004, b_c=0.002, a_r=0.02, b_r=0.0002, gamma=2.0)
    job = JobSpec(checkpoint_every=500, failure_timeout_s=60.0)
    alone = Scenario(Workload(samples=10_000_000, batch_size=1024, shards=64), times, TOOK, [MANY], job)
    ours = replace(alone, job=job.model_copy(update={"policies": ("spot",), "spot_budget": budget}))
    for seed in seeds:
        without, found = (simulate(scenario, seed, LONG_S) for scenario in (alone, ours))
        assert found.done
        slower, dearer = found.seconds / without.seconds, found.cost / without.cost
        assert min(slower, dearer) < 1.001, f"seed {seed}: {slower} times as long, {dearer} times as dear"
