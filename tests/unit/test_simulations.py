"""What simulated jobs say together: figures and where they are from, the search for the best way, and the report."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unisono.adapt.layouts import Layout, StepTime
from unisono.cli.app import application
from unisono.errors import JobError
from unisono.job import Job
from unisono_lab.commands.simulate import seconds_of
from unisono_lab.report.simulated import simulated_charts
from unisono_lab.simulation.calibration import measured
from unisono_lab.simulation.scenario import (
    Durations,
    HostKind,
    JobSpec,
    MeasuredFigures,
    NamedNetwork,
    Scenario,
    Workload,
    read_scenario,
)
from unisono_lab.simulation.simulated_run import simulate
from unisono_lab.simulation.simulated_training import reduction_s
from unisono_lab.simulation.simulation import (
    Candidate,
    Expectation,
    Goal,
    Likelihood,
    Simulate,
    Simulation,
    SimulationSettings,
    Spread,
    answer,
    commands,
    enough,
    frontier,
    left_out,
    margins,
    mixes,
    rates,
    search,
    simulation,
    wilson,
    worth_trying,
)

pytestmark = pytest.mark.unit

STEP = StepTime(a_c=0.5, b_c=0.0, a_r=0.1, b_r=0.0, gamma=1.0)
SLOW = HostKind(name="steady", count=4, workers=1, price=10.0, boot_s=0.0)
SPOT = HostKind(name="spot", count=4, workers=1, price=1.0, boot_s=0.0, between_losses_s=500.0, notice_s=60.0)
SCENARIO = Scenario(
    Workload(samples=6400, batch_size=8, shards=8), STEP, Durations(jitter=0.05), [SLOW, SPOT], JobSpec()
)
START = datetime(2026, 1, 1, tzinfo=UTC)


def simulated(scenarios: Sequence[Scenario], seeds: int) -> list[Expectation]:
    return [answer([simulate(each, seed, 1e6) for seed in range(seeds)], 2000.0) for each in scenarios]


JOB = """
[work]
samples = 6400
batch_size = 8
shards = 8

[step]
a_c = 0.5
a_r = 0.1

[[hosts]]
name = "steady"
count = 1
workers = 2
price = 3.0

[[hosts]]
name = "spot"
count = 4
workers = 1
price = 0.5
between_losses_s = 600
notice_s = 30
"""


def simulated_by_command(folder: Path, *words: str) -> Any:
    """What the command comes to with this job, on one process."""
    (folder / "job.toml").write_text(JOB)
    said = ["simulate", str(folder / "job.toml"), "--processes", "1", *words]
    return CliRunner().invoke(application(said), said)


# -- what was measured


def minted(number: int, workers: list[str], joined: list[str], ready: list[float], **more: Any) -> dict[str, Any]:
    names = {"workers": workers, "joined": joined, "ready": ready}
    return {"event": "minted", "generation": number, **names, "lost": [], "seconds": 0.0, **more}


def write_journal(folder: Path, events: Sequence[tuple[float, dict[str, Any]]]) -> None:
    lines = [json.dumps({"time": (START + timedelta(seconds=at)).isoformat(), **line}) for at, line in events]
    (folder / "journal.jsonl").write_text("\n".join(lines) + "\n")


def run_folder(path: Path, workers: int, step_s: float) -> Path:
    path.mkdir(parents=True)
    (path / "job.json").write_text(json.dumps(asdict(Job(batch_size=64, shards=8))))
    steps: list[dict[str, Any]] = [
        {"step": step, "loss": 1.0, "batch_size": 64, "world_size": workers, "generation": 1, "position": 64 * step}
        | {"seconds": {"total": 9.0 if step < 3 else step_s}, "epoch": 0, "lr": 0.1}
        for step in range(30)
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in steps))
    events: list[tuple[float, dict[str, Any]]] = [
        (0.0, {"event": "asked for", "workers": ["w1", "w2"]}),
        (12.0, minted(1, ["w1", "w2"], ["w1", "w2"], [11.5, 12.0])),
        (14.0, {"event": "formed", "generation": 1, "seconds": {"regroup": 0.2, "form": 0.3, "copy": 1.5}}),
        (20.0, {"event": "checkpoint", "step": 10, "seconds": 0.75}),
    ]
    write_journal(path, events)
    return path


def test_times_are_taken_from_runs_without_their_first_steps(tmp_path: Path) -> None:
    for workers in (1, 2, 4):
        run_folder(tmp_path / f"cells/strong-{workers}-0/run", workers, 0.8 / workers + 0.01)
    found = measured([tmp_path])
    assert found.step is not None
    assert found.step.seconds(Layout(2, 64, 8)) == pytest.approx(0.41, rel=0.03)
    assert found.measured_to == 4
    assert found.seconds == {
        "start_s": 11.5,
        "start_each_s": 0.5,
        "form_s": 0.0,
        "form_each_s": 1.0,
        "checkpoint_s": 0.75,
        "stall_s": 0.0,
        "jitter": 0.0,
    }


def recorded_growth(folder: Path, until_s: float) -> Path:
    """What a job of four workers has left that lost one and grew to eight: shards sleep for 40 ms, on two cores."""
    run_folder(folder, 4, 0.18)
    four, eight = ["w1", "w3", "w4", "w5"], ["w1", "w3", "w4", "w5", "w6", "w7", "w9", "w8"]
    first = ["w1", "w2", "w3", "w4"]
    events: list[tuple[float, dict[str, Any]]] = [
        (0.0, {"event": "agent joined", "host": "vm", "workers": 8}),
        (0.0, {"event": "asked for", "workers": first, "host": "vm", "delay_s": 0.0}),
        (5.933, minted(1, first, first, [5.88, 5.905, 5.92, 5.936])),
        (7.917, {"event": "lost", "worker": "w2", "host": "vm", "rank": 1}),
        (7.917, {"event": "asked for", "workers": ["w5"], "host": "vm", "delay_s": 0.0}),
        (8.067, minted(2, ["w1", "w3", "w4"], [], [], lost=["w2"], seconds=0.149)),
        (8.082, {"event": "formed", "generation": 2, "seconds": {"regroup": 0.008, "form": 0.004, "copy": 0.007}}),
        (8.354, minted(3, four, ["w5"], [0.065], seconds=0.287)),
        (8.396, {"event": "formed", "generation": 3, "seconds": {"regroup": 0.376, "form": 0.004, "copy": 0.03}}),
        (15.477, {"event": "resized", "workers": 8, "before": 4}),
        (15.477, {"event": "asked for", "workers": ["w6", "w7", "w8", "w9"], "host": "vm", "delay_s": 0.0}),
        (15.672, minted(4, eight, ["w6", "w7", "w9", "w8"], [0.116, 0.147, 0.162, 0.171], seconds=0.078)),
        (15.756, {"event": "formed", "generation": 4, "seconds": {"regroup": 0.084, "form": 0.011, "copy": 0.064}}),
    ]
    write_journal(folder, [event for event in events if event[0] <= until_s])
    done: list[tuple[float, float, int, int]] = [(6.236 + 0.1834 * step, 0.183, 1, 4) for step in range(10)]
    done += [(8.346, 0.459, 2, 3), (8.589, 0.242, 3, 4), *((8.772 + 0.1808 * n, 0.181, 3, 4) for n in range(39))]
    done += [(15.887, 0.225, 4, 8), *((16.009 + 0.109 * n, 0.109, 4, 8) for n in range(40))]
    steps = [
        {"step": step, "loss": 1.0, "batch_size": 64, "world_size": workers, "generation": generation, "epoch": 0}
        | {"time": START.timestamp() + at, "position": 64 * step, "lr": 0.1, "seconds": {"total": took}}
        for step, (at, took, generation, workers) in enumerate(done)
        if at <= until_s
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in steps))
    return folder


def test_what_each_worker_adds_is_told_apart_where_generations_differ_enough(tmp_path: Path) -> None:
    found = measured([recorded_growth(tmp_path / "run", until_s=30.0)]).seconds
    taken = Durations.model_validate({"copy_s": found["copy_s"], "copy_each_s": found["copy_each_s"], "form_s": 0.0})
    copies = {workers: taken.forming(workers, joined=True) for workers in (4, 8)}
    assert 0.01 < copies[4] < copies[8] < 0.2
    assert found["form_s"] == 0.0  # of one size only
    assert found["form_each_s"] == pytest.approx(0.015 / 3, rel=0.01)


def test_later_workers_of_a_host_and_noticing_a_loss_have_times_of_their_own(tmp_path: Path) -> None:
    folder = recorded_growth(tmp_path / "run", until_s=14.0)
    found = measured([folder]).seconds
    assert found["start_s"] == 5.88
    assert found["later_start_s"] == 0.065
    assert found["start_each_s"] == pytest.approx(0.016, abs=0.001)
    assert found["detect_s"] == pytest.approx(0.0, abs=0.01)  # it was the rest of a step
    with (folder / "journal.jsonl").open("a") as file:
        for at, line in (
            (30.0, {"event": "agent joined", "host": "b"}),
            (30.0, {"event": "asked for", "workers": ["w9"], "host": "b"}),
            (44.0, minted(4, ["w1", "w9"], ["w9"], [13.0])),
        ):
            file.write(json.dumps({"time": (START + timedelta(seconds=at)).isoformat(), **line}) + "\n")
    assert measured([folder]).seconds["start_s"] == pytest.approx((5.88 + 13.0) / 2)


def test_what_the_file_says_goes_before_what_was_measured_and_all_figures_say_where_they_are_from(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        "[work]\nsamples = 6400\nbatch_size = 64\nshards = 8\n[seconds]\nstart_s = 99.0\n"
        '[[hosts]]\nname = "a"\ncount = 1\nworkers = 8\n'
    )
    found = read_scenario(path, measured([run_folder(tmp_path / "run", 2, 0.4)]))
    assert found.seconds.start_s == 99.0
    assert found.seconds.form_each_s == 1.0
    assert [found.sources[name] for name in ("start_s", "form_each_s", "again_s", "a_c")] == [
        "given",
        "measured",
        "default",
        "fitted",
    ]


def test_what_a_single_number_of_workers_does_not_tell_of_a_reduction_is_a_guess_and_said_to_be_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[work]\nsamples = 6400\nbatch_size = 64\nshards = 8\n[[hosts]]\nname = "a"\ncount = 1\nworkers = 8\n'
    )
    for name, sizes in (("one", [4]), ("several", [2, 4])):
        folders = [run_folder(tmp_path / name / str(size), size, 0.8 / size + 0.01 * size) for size in sizes]
        found = read_scenario(path, measured(folders))
        reductions = [found.step.a_r + found.step.b_r * (workers - 2) for workers in (4, 8)]
        assert found.step.seconds(Layout(4, 64, 8)) == pytest.approx(0.24, rel=0.03)
        assert found.sources["a_r"] == "fitted"
        assert found.sources["b_c"] == "default"  # all shards had one size
        assert found.sources["b_r"] == ("default" if name == "one" else "fitted")
        if name == "one":
            assert reductions[1] == pytest.approx(1.5 * reductions[0])
    alone = read_scenario(path, measured([run_folder(tmp_path / "alone", 1, 0.8)]))
    assert {name for name, source in alone.sources.items() if source == "fitted"} == {"a_c"}


def test_a_guess_about_hosts_says_that_it_is_one_and_what_it_matters(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("notice_s = 30", "notice_s = 30\nboot_s = 5"))
    found = read_scenario(path)
    about = {name: found.sources[name] for name in found.figures() if "." in name}
    assert about == {
        "steady.boot_s": "default",
        "spot.boot_s": "given",
        "spot.away_s": "default",
        "spot.whole_zone": "default",
    }
    assert [kind.boot_s for kind in found.scaled("steady.boot_s", 2.0).hosts] == [120.0, 5.0]
    assert found.scaled("spot.whole_zone", 2.0).hosts[1].whole_zone == 1.0
    guessed = {one.name for one in simulation(found, SimulationSettings(seeds=2)).guesses}
    assert "steady.boot_s" in guessed


def test_lines_of_a_run_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 2, 0.4)
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"event": "lo\n{"event": "lost"}\n')
    done = simulated_by_command(tmp_path, "--from", str(folder), "--seeds", "1")
    assert done.exit_code == 0, done.output
    assert "journal.jsonl: line 5 cannot be read and is left out" in done.stderr


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 2, 0.4)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(JobError, match="no step after the first"):
        measured([folder])


def test_lines_of_a_run_that_make_no_sense_are_no_figures(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 2, 0.4)
    sound = measured([folder])
    deranged: list[dict[str, Any]] = [
        {"event": "asked for", "workers": 3},
        {"event": "asked for", "workers": ["w3", ["w4"]]},
        {"event": "minted", "generation": 2, "joined": ["w3"], "time": "2020-01-01T00:00:00+00:00"},  # a clock put back
        {"event": "minted", "generation": 2, "joined": ["w3"], "ready": [-1.0], "workers": 7},
        {"event": "minted", "generation": 2, "joined": ["w3"], "ready": [1e300], "workers": ["w1", "w3"]},
        {"event": "minted", "generation": 2, "joined": 7, "time": "0001-01-01T00:00:00+23:59"},
        {"event": "formed", "seconds": {"regroup": 10**400, "form": -1.0, "copy": float("nan"), "detect": True}},
        {"event": "checkpoint", "seconds": float("inf")},
    ]
    with (folder / "journal.jsonl").open("a") as file:
        file.writelines(f"{json.dumps({'time': START.isoformat(), **line})}\n" for line in deranged)
    step = {"step": 30, "loss": 1.0, "batch_size": 64, "world_size": 2, "generation": 1}
    odd = (
        {"seconds": {"total": 1.0}, "world_size": 9},
        {"seconds": [1]},
        {"seconds": {"total": 1e300}},
        {"seconds": {"total": 1.0}, "world_size": 10**400},
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps({**step, **each})}\n" for each in odd)
        file.write(f"{json.dumps({**step, 'generation': [1], 'seconds': {'total': 1.0}})}\n")
    found = measured([folder])
    assert found.step == sound.step
    assert found.measured_to == sound.measured_to
    assert found.seconds.keys() == sound.seconds.keys()
    Durations.model_validate(dict(found.seconds))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 50_000, "nested too deep"),
        ("x = '" + "x" * 2**20 + "'", "larger than"),
        ("\0", "no TOML"),
        ("[[hosts]]\nname = 'a'\ncount = 1\nworkers = 1\nbetween_losses_s = 1e-9\n", "between_losses_s"),
    ],
    ids=["deep", "large", "garbage", "losses without end"],
)
def test_a_scenario_that_is_none_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(JobError, match=words):
        read_scenario(tmp_path / "job.toml")


def test_what_is_no_file_is_neither_waited_for_nor_kept_open_as_a_scenario(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.toml")
    with pytest.raises(JobError, match="is no file"):
        read_scenario(tmp_path / "job.toml")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(JobError, match=f"Is a directory: '{tmp_path}'"):
            read_scenario(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# -- answers


def test_a_probability_has_the_interval_of_wilson() -> None:
    # Wilson, 1927; as in Brown, Cai and DasGupta, Statistical Science 16(2), 2001.
    assert wilson(8, 10) == pytest.approx((0.490, 0.943), abs=1e-3)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0


def test_more_workers_no_longer_pay_where_twice_as_many_are_hardly_faster() -> None:
    job = replace(SCENARIO, work=Workload(samples=6400, batch_size=64, shards=64))
    slowed = replace(job, step=replace(STEP, a_r=0.1, b_r=0.2))
    assert enough(rates(job, 64)) == 64
    assert enough(rates(job, 56)) == 32  # with 56, the busiest worker has two of 64 shards as well
    assert 1 < enough(rates(slowed, 64)) < 64
    assert all(rate.extrapolated for rate in rates(job, 4))
    assert [rate.extrapolated for rate in rates(replace(job, measured_to=2), 4)] == [False, False, True]


# -- the search


@pytest.mark.slow
def test_the_cheapest_mix_within_the_deadline_is_found() -> None:
    goal = Goal("cost", deadline_s=2000.0)
    best, tried = search(SCENARIO, goal, simulated, 4, 0.6, [()])
    assert goal.holds(best[0].answer)
    assert best[0].answer.cost.p50 <= min(one.answer.cost.p50 for one in tried if goal.holds(one.answer)) * 1.02
    assert best[0].scenario.hosts[0].count < 4, "steady hosts are ten times as dear"
    assert tried == sorted(tried, key=lambda one: goal.key(one.answer))


def priced(cost: Callable[[Scenario], float]) -> Simulate:
    """Answers as if each scenario cost what a function says, in all seeds."""

    def simulate(scenarios: Sequence[Scenario], seeds: int) -> list[Expectation]:
        sure = Likelihood.of(seeds, seeds)
        return [
            Expectation(Spread(9.0, 9.0), Spread(cost(one), cost(one)), sure, None, {}, 0.0, seeds) for one in scenarios
        ]

    return simulate


def test_policies_that_may_matter_are_searched_and_each_given_set_instead() -> None:
    def cost(scenario: Scenario) -> float:
        return scenario.room - 0.5 * ("spot" in scenario.job.policies)

    assert worth_trying(SCENARIO) == [(), ("spot",)]
    mixed = replace(SCENARIO, hosts=[SLOW, SPOT.model_copy(update={"speed": 2.0})], job=JobSpec(policies=("scaling",)))
    assert worth_trying(mixed) == [(), ("scaling",), ("spot",), ("straggler",)]
    assert ("goodput",) in worth_trying(replace(SCENARIO, work=SCENARIO.work.model_copy(update={"noise_scale": 9.0})))
    best, _ = search(SCENARIO, Goal(), priced(cost), seeds=2, step_s=0.6)
    assert best[0].scenario.job.policies == ("spot",)
    given, _ = search(SCENARIO, Goal(), priced(cost), 2, 0.6, [("straggler",)])
    assert {one.scenario.job.policies for one in given} == {("straggler",)}


def test_of_two_ways_that_are_as_good_the_one_without_a_policy_is_taken() -> None:
    def answers(scenarios: Sequence[Scenario], seeds: int) -> list[Expectation]:
        """The policy looks better with few seeds, and is as good with all."""

        def cost(one: Scenario) -> float:
            return one.room - 0.5 * (seeds < 9 and "spot" in one.job.policies)

        return priced(cost)(scenarios, seeds)

    best, _ = search(SCENARIO, Goal(), answers, seeds=9, step_s=0.6)
    assert [one.scenario.job.policies for one in best[:2]] == [(), ("spot",)]


def test_what_the_next_best_would_cost_is_told_for_other_hosts_too_where_the_first_ones_share_theirs() -> None:
    def cost(scenario: Scenario) -> float:
        return 1e4 * scenario.hosts[0].count + 1e5 * scenario.hosts[1].count + 10.0 + scenario.job.checkpoint_every

    best, _ = search(SCENARIO, Goal(), priced(cost), seeds=2, step_s=0.6)
    near, far = margins(best, Goal())
    assert not near.has_other_hosts
    assert near.next is best[1]
    assert far.has_other_hosts
    assert far.next.hosts != best[0].hosts
    assert far.share == pytest.approx(far.next.answer.cost.p50 / best[0].answer.cost.p50 - 1)
    assert 0 <= near.share < far.share
    assert margins(best[:1], Goal()) == []


def test_what_exceeds_the_budget_comes_behind_what_does_not() -> None:
    dear = Expectation(Spread(1.0, 1.0), Spread(90.0, 120.0), Likelihood.of(10, 10), None, {}, 0.0, 10)
    slow = replace(dear, seconds=Spread(5.0, 5.0), cost=Spread(40.0, 60.0))
    late = replace(slow, in_time=Likelihood.of(5, 10))
    goal = Goal("time", budget=100.0)
    assert sorted([late, dear, slow], key=goal.key) == [slow, dear, late]


def test_the_frontier_has_what_none_beats_in_time_and_cost() -> None:
    _, tried = search(SCENARIO, Goal(), simulated, 2, 0.6, [()])
    best = frontier(tried)
    for one in best:
        assert not any(
            other.answer.seconds.p50 < one.answer.seconds.p50 and other.answer.cost.p50 < one.answer.cost.p50
            for other in tried
        )


def test_mixes_have_enough_hosts_and_stay_few() -> None:
    many = replace(SCENARIO, hosts=[SPOT.model_copy(update={"name": f"s{number}", "count": 8}) for number in range(4)])
    assert 1 < len(mixes(many)) <= 60
    assert all(mix.room >= mix.job.fewest for mix in mixes(many))


def test_each_kind_of_host_has_its_command_and_what_the_commands_lack_is_told() -> None:
    job = JobSpec(fewest=2, checkpoint_every=50, policies=("spot", "straggler"), begin_with=3)
    first, steady, spot = commands(replace(SCENARIO, hosts=[SPOT, SLOW], job=job))
    alike = ["--failure-timeout-s", "300", "--shards", "8", "--checkpoint-every", "50", "--policy", "straggler"]
    assert first.hosts == "one steady host", "it stays, and the coordinator with it"
    run = ["unisono", "run", "-n", "2:8", "--here", "1", "--coordinator", ":7777", "--max-restarts", "1000000"]
    assert first.words.split() == [*run, *alike, "train.py"]
    join = ["unisono", "join", "https://HOST:7777", "-n", "1", "--token-file", "token"]
    join += ["--certificate", "certificate.pem", *alike]
    assert (steady.hosts, steady.words.split()) == ("each of 3 other steady hosts", [*join, "train.py"])
    assert (spot.hosts, spot.words.split()) == ("each of 4 spot hosts", [*join, "--notices", "auto", "train.py"])
    lacks = " ".join(left_out(replace(SCENARIO, job=job)))
    assert all(words in lacks for words in ("comes back", "unisono resize 3", "no policy spot"))
    assert "no coordinator" not in lacks


def test_one_host_alone_has_no_coordinator_for_others_and_hosts_that_may_all_go_are_told_of() -> None:
    (only,) = commands(
        replace(SCENARIO, hosts=[SLOW.model_copy(update={"count": 1}), SPOT.model_copy(update={"count": 0})])
    )
    assert "--coordinator" not in only.words
    assert left_out(replace(SCENARIO, hosts=[SLOW])) == []
    two = [SLOW.model_copy(update={"count": 2}), SPOT.model_copy(update={"count": 1})]
    assert [one.hosts for one in commands(replace(SCENARIO, hosts=two))][1:] == [
        "the other steady host",
        "the spot host",
    ]
    assert "loses no coordinator" in " ".join(left_out(replace(SCENARIO, hosts=[SPOT])))


def test_the_commands_options_are_those_of_run_and_join() -> None:
    for one in commands(replace(SCENARIO, job=JobSpec(checkpoint_every=50, policies=("straggler",)))):
        words = one.words.split()
        shown = CliRunner().invoke(application([words[1]]), [words[1], "--help-all"], env={"COLUMNS": "300"}).output
        assert {word for word in words if word.startswith("-")} <= set(shown.replace(",", " ").split()), one.words


# -- the command line


@pytest.mark.parametrize(("text", "seconds"), [("8h", 28800), ("90m", 5400), ("1.5d", 129600), ("20", 20), ("3 s", 3)])
def test_times_are_read_with_their_units(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_slow_hosts_and_slow_networks_have_the_time_that_their_jobs_take(tmp_path: Path) -> None:
    old = SLOW.model_copy(update={"count": 1, "speed": 0.01})
    long = replace(SCENARIO, work=Workload(samples=40_000, batch_size=8, shards=8))  # its steps are drawn several times
    alone = replace(long, hosts=[old])
    assert simulation(alone, SimulationSettings(seeds=1)).variants[0].outcomes[0].done
    network = NamedNetwork(latency_s=0.0, bytes_per_s=1e6, gradient_bytes=1e9, topology="direct")
    steady = replace(long, hosts=[SLOW], network=network)
    assert simulation(steady, SimulationSettings(seeds=1)).variants[0].outcomes[0].done


@pytest.mark.parametrize("text", ["", "0h", "-3h", "8 hours", "1e9h", "h", "9999999d", "9" * 400])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--deadline"):
        seconds_of(text)


@pytest.mark.slow
def test_the_command_answers_searches_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "report"
    words = ["--seeds", "3", "--deadline", "1h", "--minimise", "time", "--out", str(out), "--json"]
    done = simulated_by_command(tmp_path, *words, "--policies", "none", "--policies", "spot")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["policies"] for one in found["variants"]] == ["no policies", "spot"]
    assert found["extrapolation"] is True
    assert found["figures"]["a_c"] == {"value": 0.5, "source": "given"}
    assert {one["figure"] for one in found["guesses"]} <= set(found["figures"])
    assert {"spot"} & {name for one in found["candidates"] for name in one["policies"]}
    assert found["candidates"][0]["commands"][0]["command"].startswith("unisono run -n 1:")
    assert found["margins"]
    page = (out / "report.html").read_text()
    assert "extrapolation" in page
    assert "unisono run -n" in page
    assert (out / "plots" / "candidates.png").stat().st_size > 5000


def test_what_is_beyond_the_limits_is_the_nearest_and_not_recommended() -> None:
    goal = Goal(deadline_s=1.0)
    (variant,) = simulation(SCENARIO, SimulationSettings(goal, seeds=1)).variants
    late = Candidate(SCENARIO, variant.answer)
    found = Simulation(SCENARIO, goal, [variant], rates(SCENARIO, 8), (), [late], [late])
    for other, label in ((goal, "nearest to the limits"), (Goal(), "recommended")):
        answered = replace(late, answer=answer(variant.outcomes, other.deadline_s))
        (chart,) = (
            one
            for one in simulated_charts(replace(found, goal=other, candidates=[answered]))
            if one.name == "candidates"
        )
        assert label in {text.get_text() for text in chart.figure.legends[0].get_texts()}


def test_limits_alone_are_answered_and_a_table_without_limits_has_no_column_for_them(tmp_path: Path) -> None:
    plain = simulated_by_command(tmp_path, "--seeds", "1").stdout
    assert "in time" not in plain.split("Glossary")[0]
    limited = simulated_by_command(tmp_path, "--seeds", "1", "--budget", "0.01").stdout
    assert "It costs 0.01 at most with a probability of 0 %" in " ".join(limited.split())
    assert "budget" in limited.split("This is an extrapolation")[1], "a column"
    found = json.loads(simulated_by_command(tmp_path, "--seeds", "1", "--budget", "9e9", "--json").stdout)
    assert found["variants"][0]["in_budget"] == 1.0


def test_an_unknown_policy_is_refused_by_name(tmp_path: Path) -> None:
    done = simulated_by_command(tmp_path, "--seeds", "1", "--policies", "nonsense")
    assert isinstance(done.exception, JobError)
    assert str(done.exception).startswith("--policies: there is no policy 'nonsense': choose of ")
    assert "spot" in str(done.exception), "it is one here"
    with pytest.raises(JobError, match=r"job.policies: there is no policy 'nonsense'"):
        simulation(replace(SCENARIO, job=JobSpec(policies=("nonsense",))), SimulationSettings(seeds=1))


def test_the_scenario_of_the_guide_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "simulate.md").read_text()
    (tmp_path / "job.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    found = read_scenario(tmp_path / "job.toml")
    assert found.room == 56
    assert found.job.policies == ("spot",)
    shipped = Path(__file__).parents[2] / "examples" / "simulation" / "digits.toml"
    assert read_scenario(shipped, MeasuredFigures(STEP)).room == 8


# -- networks that are named

NAMED = "[network]\nlatency_s = 0.001\nbytes_per_s = 1e8\ngradient_bytes = 4e6\n"


def named(folder: Path, network: str, *studies: Path) -> Scenario:
    path = folder / "job.toml"
    path.write_text(
        "[work]\nsamples = 6400\nbatch_size = 64\nshards = 64\n[step]\na_c = 0.05\na_r = 9.0\n"
        f'{network}[[hosts]]\nname = "a"\ncount = 1\nworkers = 64\n'
    )
    return read_scenario(path, measured(studies))


def test_reductions_on_a_named_network_are_forecast_by_its_topology(tmp_path: Path) -> None:
    found = named(tmp_path, NAMED)
    assert found.network is not None
    for workers in (2, 4, 16, 64):  # beyond 16 as the messages of fewer go on
        share_s = 2 * (workers - 1) / workers * 4e6 / 1e8
        assert reduction_s(found.network, workers) == pytest.approx(2 * 0.001 + share_s, rel=1e-6)
    (first, *_, most) = rates(found, 64)
    assert first.samples_per_s == pytest.approx(64 / (64 * 0.05), rel=0.05)  # alone there is nothing to reduce
    assert most.samples_per_s == pytest.approx(64 / (0.05 + 0.082), rel=0.1)  # a_r is not looked at
    slow = named(tmp_path, NAMED.replace("1e8", "1e6"))
    assert rates(slow, 64)[-1].samples_per_s < 0.1 * most.samples_per_s
    star = named(tmp_path, NAMED + 'topology = "star"\n')
    assert star.network is not None
    assert reduction_s(star.network, 64) > 20 * reduction_s(found.network, 64)


def test_a_network_has_the_figures_of_the_file_or_of_studies_and_says_which(tmp_path: Path) -> None:
    for workers, bandwidth in ((2, 3e7), (4, 2e7)):
        folder = run_folder(tmp_path / f"study/cells/strong-{workers}-0/run", workers, 0.8 / workers)
        reduction = {"latency_s": 0.002, "bandwidth_bytes_per_s": bandwidth}
        result = {"world_size": workers, "reduction": reduction, "gradient_bytes": 1_000_000}
        (folder / "result.json").write_text(json.dumps(result))
    found = named(tmp_path, "[network]\nlatency_s = 0.005\n", tmp_path / "study")
    assert found.network is not None
    assert (found.network.latency_s, found.network.bytes_per_s, found.network.gradient_bytes) == (0.005, 2e7, 1e6)
    assert [found.sources[name] for name in ("latency_s", "bytes_per_s")] == ["given", "measured"]
    assert {"a_r", "b_r"}.isdisjoint({*found.sources, *found.figures()})
    assert found.scaled("bytes_per_s", 2.0).figures()["bytes_per_s"] == 4e7
    assumed = named(tmp_path, "[network]\nbytes_per_s = 1e9\ngradient_bytes = 4e6\n")
    assert assumed.sources["latency_s"] == "default"  # so it is among the guesses


def test_a_network_that_nobody_measured_has_to_be_given(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"network.bytes_per_s: Field required; .*a study of two workers"):
        named(tmp_path, "[network]\n")
    with pytest.raises(JobError, match=r"network.topology"):
        named(tmp_path, NAMED + 'topology = "moebius"\n')
