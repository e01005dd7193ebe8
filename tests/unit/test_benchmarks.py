"""What the benchmarks decide and compute, without a single measurement."""

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    accuracy,
    adaptive,
    coordinator,
    coordinator_sockets,
    growth,
    recovery,
    side_by_side,
    soak,
    stale,
    strategies,
    topologies,
)
from benchmarks.contenders import everybody
from benchmarks.contenders.loop import batches
from benchmarks.crew import Crew, cleaned
from benchmarks.elastic_job import Job, seconds_of
from benchmarks.exercise import Outcome
from benchmarks.family import growth_per_hour
from benchmarks.figures import Ratio, mean_of_workers, slowest, times_as_fast, times_as_long
from benchmarks.harness import Measured
from benchmarks.open_files import TooFewFiles, allow_files
from benchmarks.place import Place
from benchmarks.programs.exchange import traffic
from benchmarks.programs.exercises import Traffic
from benchmarks.programs.reduced import Reduced, ways
from benchmarks.standings import FAILED, NOT_INSTALLED, standings
from benchmarks.step import cells
from benchmarks.task import Task, Trained
from benchmarks.training_spec import Look
from unisono.launch.tuning import tune
from unisono.plan.topology import distinct

pytestmark = [pytest.mark.unit, pytest.mark.slow]


# -- the order of runs ------------------------------------------------------------------------------------------------


# -- figures ----------------------------------------------------------------------------------------------------------


def test_a_ratio_stands_inside_of_its_interval_and_a_repeatable_one_has_none() -> None:
    found = times_as_fast([1.0, 1.1, 0.9, 1.0, 1.2], [2.0, 2.1, 1.9, 2.3, 2.0])
    assert found.low < found.value < found.high
    assert found.value == 2.0
    assert times_as_fast([1.0, 1.0, 1.0], [4.0, 4.0, 4.0]) == Ratio(4.0, 4.0, 4.0)


def test_turns_are_compared_with_those_beside_them() -> None:
    assert times_as_long([[2.0, 20.0], [6.0, 2.0]], [[1.0, 10.0], [3.0, 1.0]]) == Ratio(2.0, 2.0, 2.0)


def test_a_run_takes_as_long_as_its_slowest_worker_and_its_loss_is_the_mean_of_all() -> None:
    assert slowest([[1.0, 9.0, 1.0], [2.0, 2.0, 2.0]]) == 2.0
    assert mean_of_workers([[1.0, 2.0], [3.0, 6.0]]) == [2.0, 4.0]


# -- who is compared, and how they stand ------------------------------------------------------------------------------


def found(*milliseconds: float, losses: tuple[float, ...] = (1.0,), workers: int = 2) -> Measured[Trained]:
    return Measured([[Trained(seconds=[1e-3 * took] * 3, losses=list(losses))] * workers for took in milliseconds])


CONTENDERS = [one for one in everybody(2, 1) if one.key in ("plain", "unisono", "ddp-1", "ddp-25", "fabric")]
FOUND = {
    "plain": found(100, 100, 100, workers=1),
    "unisono": found(60, 60, 60),
    "ddp-1": found(90, 90, 90),
    "ddp-25": found(75, 75, 75),
}


def test_everybody_is_compared_with_the_plain_loop_and_the_best_ddp() -> None:
    table = {one.key: one for one in standings(CONTENDERS, FOUND, batch_norm=False)}
    ours = table["unisono"]
    assert ours.of_ddp is not None
    assert ours.of_plain is not None
    assert (ours.of_ddp.value, ours.of_plain.value) == pytest.approx((75 / 60, 100 / 60))
    assert ours.efficiency == pytest.approx(100 / (2 * 60))
    assert table["ddp-25"].of_ddp == Ratio(1.0, 1.0, 1.0)


def test_who_is_not_installed_or_failed_has_a_row_that_says_so() -> None:
    broken = {**FOUND, "ddp-1": Measured(FOUND["ddp-1"].runs, failure="rank 0: no")}
    table = {one.key: one for one in standings(CONTENDERS, broken, batch_norm=False)}
    assert (table["fabric"].note, table["ddp-1"].note) == (NOT_INSTALLED, FAILED)
    assert cells(table["fabric"])[1] == "not installed"
    assert len({len(cells(one)) for one in table.values()}) == 1


def test_losses_are_compared_with_the_plain_loop_and_with_batch_norm_among_equal_numbers_of_workers() -> None:
    changed = {**FOUND, "ddp-1": found(90, 90, 90, losses=(1.5,))}
    table = {one.key: one for one in standings(CONTENDERS, changed, batch_norm=False)}
    assert (table["ddp-1"].did_same_work, table["unisono"].did_same_work) == (False, True)
    assert cells(table["ddp-1"])[-1] == "DIFFERENT (5e-01)"
    split = {key: found(90, 90, 90, losses=(1.5,)) if key != "plain" else FOUND[key] for key in FOUND}
    assert all(one.did_same_work for one in standings(CONTENDERS, split, batch_norm=True))
    assert not all(one.did_same_work for one in standings(CONTENDERS, split, batch_norm=False))


def test_the_workers_parts_are_the_whole_batch_in_its_order() -> None:
    task = Task(contender="plain", workload="tiny", batch_size=10)
    data = task.data().tensors[0]
    for workers in (1, 2, 3, 5):
        parts = [next(batches(task, Place(rank, workers)))[0] for rank in range(workers)]
        assert torch.equal(torch.cat(parts), data[:10])


# -- how workers are started ------------------------------------------------------------------------------------------


def test_all_processes_have_the_same_allocator_and_nothing_of_somebody_elses_job() -> None:
    tuned, default = (Crew.here(1, allocator=allocator).variables(0, 1) for allocator in ("tuned", "default"))
    assert tuned == default | dict(tune({}, platform.libc_ver()[0]).variables)
    assert cleaned(tuned).keys().isdisjoint(tuned.keys() - default.keys())
    assert cleaned({"PATH": "/bin", "UNISONO_RANK": "1", "MALLOC_ARENA_MAX": "1", "OMP_PROC_BIND": "1"}) == {
        "PATH": "/bin"
    }


# -- shards, all-reduce, network --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_bounds_of_all_workers_together_cover_the_result_once(workers: int) -> None:
    parts = [traffic(Place(rank, workers), 64 * 1000)() for rank in range(workers)]
    assert sum(part.numel() for part in parts) == 64 * 1000


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_of_each_way_it_is_told_what_was_expected_and_what_the_slowest_worker_took(workers: int) -> None:
    looks = [
        {"latency_s": [[0.0, late], [late, 0.0]], "bytes_per_s": [[0.0, 9e6], [9e6, 0.0]]} for late in (1e-3, 2e-3, 9.0)
    ]
    first, second = ({2**12: dict.fromkeys(ways(workers), took)} for took in ([0.1, 0.2, 0.3], [0.3, 0.1, 0.2]))
    found = [Reduced(seconds=second if rank % 2 else first, links=looks, bytes_per_s=1e6) for rank in range(workers)]
    assert topologies.link_of(found[0]) == (2e-3, 1e6)
    rows = list(topologies.rows_of(found, 2e-3, 1e6))
    assert [row.way for row in rows] == [*distinct(workers), "1 server"]
    assert all(row.seconds == [0.3, 0.2, 0.3] and row.measured_s == 0.3 for row in rows)
    direct = 2 * (2e-3 + (workers - 1) / workers * 2**12 / 1e6)
    assert rows[0].forecast.seconds == pytest.approx(direct)
    (grid,) = topologies.grids(rows, {workers: (2e-3, 1e6)}, "slow")
    assert all(len(cells) == len(grid.columns) for cells in grid.rows)


# -- noise and report -------------------------------------------------------------------------------------------------


# -- recovery ---------------------------------------------------------------------------------------------------------


def test_a_stall_is_what_the_survivors_lost_beyond_a_step_of_their_own(tmp_path: Path) -> None:
    begun = 1_700_000_000.0
    commits = {
        "w1": [0.0, 1.0, 2.0, 4.5, 6.0, 7.5, 8.5],  # killed is w2, at 2.2; two workers take 1.5 s a step
        "w2": [0.0, 1.0, 2.0],
        "w3": [8.5],
    }
    for worker, times in commits.items():
        lines = [f"{step} {begun + at}\n" for step, at in enumerate(times)]
        (tmp_path / f"commits-{worker}.txt").write_text("".join(lines))
    formed = {"time": "2023-11-14T22:13:22.900+00:00", "event": "formed", "seconds": {"regroup": 0.1}}
    (tmp_path / "journal.jsonl").write_text(json.dumps(formed) + "\n")
    found = recovery.Watched(tmp_path).recovery(begun + 2.2, ["w1", "w2"], "w2", until=begun + 60)
    assert (found.stall, found.step, found.replaced) == pytest.approx((1.0, 1.5, 6.3))
    assert found.parts == {"regroup": 0.1}


# -- growing and shrinking, being elastic, the soak -------------------------------------------------------------------


def test_parts_of_steps_count_where_a_time_is_compared_with_calm_steps() -> None:
    times = [0.0, 1.0, 2.0, 4.0, 6.0, 7.0]
    assert growth.progress(times, 3.0) == 2.5
    assert growth.slowed(times, 2.0, 5.0, calm=1.0) == 2.0
    assert growth.slowed(times, 0.5, 1.5, calm=1.0) == 1.0


def test_a_calm_step_of_a_number_of_workers_that_never_was_calm_lies_between_its_neighbours() -> None:
    spans = [growth.Span("calm", 0.0, 2.0, 2, 0), growth.Span("calm", 10.0, 16.0, 4, 0)]
    assert growth.calm_steps([0.0, 1.0, 2.0, 10.0, 13.0, 16.0], spans) == {2: 1.0, 3: 2.0, 4: 3.0}


def test_survivors_stall_as_long_as_the_one_that_stalls_longest() -> None:
    old, new = ({"workers": names, "time": "2023-11-14T22:13:21+00:00"} for names in (["w1", "w2"], ["w1", "w2", "w3"]))
    formed = {"time": "2023-11-14T22:13:21.500+00:00", "seconds": {"copy": 0.1}}
    base = seconds_of("2023-11-14T22:13:20+00:00")
    times = {"w1": [base, base + 3.0], "w2": [base + 0.5, base + 3.0], "w3": [base + 3.0]}
    found = growth.change(old, new, formed, times, {3: 1.0})
    assert (found.before, found.after, found.stall) == pytest.approx((2, 3, 2.0))
    assert found.parts == pytest.approx({"copy": 0.1, "first step": 0.5})


def test_the_steps_right_after_a_job_was_woken_do_not_count() -> None:
    assert side_by_side.median_step([0.0, 5.0, 6.0, 7.0, 9.0, 10.0, 30.0], 4.0, 20.0) == 2.0 - 0.5


def test_a_turn_in_which_one_worker_has_made_too_few_steps_to_tell_how_long_they_take_goes_on(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for name, times in {"0": [1, 2, 3, 4, 5], "1": [1, 2, 3, 4]}.items():
        (tmp_path / f"commits-{name}.txt").write_text("".join(f"{at} {at}.0\n" for at in times))
    assert not side_by_side.has_a_step(job, 2.0)  # of the second three are left, and of these two do not count
    assert side_by_side.has_a_step(job, 1.0)
    assert side_by_side.slowest_median(job, 1.0, 5.0) == 1.0


def test_a_soak_repeats_itself_and_spares_what_is_to_live_long() -> None:
    choice = soak.Choice(minutes=10, rare_s=100)
    happens = list(soak.faults(choice))
    assert happens == list(soak.faults(choice))
    assert [fault.kind for fault in happens if fault.kind in ("kill coordinator", "kill oldest")] == [
        "kill coordinator",
        "kill oldest",
    ] * 2 + ["kill coordinator"]
    assert {fault.kind for fault in happens} == {"kill", "leave", "resize", "kill coordinator", "kill oldest"}
    assert len(happens) == pytest.approx(200, rel=0.2)


def test_growth_is_what_happens_within_the_life_of_a_process() -> None:
    flat = [(float(at), pid, 100.0 * pid) for pid, begin in ((1, 0), (2, 500)) for at in range(begin, begin + 500, 5)]
    grown = growth_per_hour(flat)
    assert grown is not None
    assert (grown.low, grown.value, grown.high) == pytest.approx((0, 0, 0), abs=1e-6)
    leaks = growth_per_hour([(at, pid, value + at / 3600) for at, pid, value in flat])
    assert leaks is not None
    assert leaks.value == pytest.approx(1.0)
    assert growth_per_hour(flat[:10]) is None


# -- what adapting is worth -------------------------------------------------------------------------------------------


def looked(seconds: float, accuracy: float) -> Look:
    return Look(seconds=seconds, cpu_seconds=seconds / 2, samples=1, steps=1, batch_size=1, accuracy=accuracy)


def test_a_target_is_reached_when_it_is_first_seen_and_who_never_sees_it_takes_for_ever() -> None:
    runs = [[looked(1, 0.8), looked(2, 0.91), looked(3, 0.89)], [looked(1, 0.8)], []]
    assert adaptive.times(runs, 0.9) == [2, float("inf"), float("inf")]
    assert adaptive.times(runs, 0.9, "cpu_seconds")[0] == 1
    assert adaptive.sooner([1.0, 2.0, 3.0], [2.0, 4.0, float("inf")]).value == 0.5
    assert adaptive.sooner([float("inf")] * 2, [2.0, float("inf")]).value == float("inf")


def test_accuracies_are_compared_seed_by_seed_and_a_run_that_diverged_knows_nothing() -> None:
    runs = [looked(1, 0.9), looked(1, 0.7), None]
    assert accuracy.accuracies(runs) == [0.9, 0.7, 0.0]
    assert accuracy.beside(runs, runs) == "+0.00"
    told = accuracy.beside([looked(1, 0.5), looked(1, 0.52)], [looked(1, 0.4), looked(1, 0.4)])
    assert told.startswith("+11.00 (-1.71")  # a difference of 11 and a standard error of 1, with one degree of freedom


def test_with_eight_times_the_batch_nothing_but_the_rate_is_another_one() -> None:
    choice = accuracy.Choice()
    specs = accuracy.large(choice, 0.1)
    for one in specs.values():
        assert one.batch_size // one.shards == accuracy.SMALL
        assert one.factor * one.rate == pytest.approx(0.1 if one.iterations else 0.8)
    assert specs["AdaScale"].rate == accuracy.small(choice, 0.1).rate
    assert [spec.policies()[0].name for spec in specs.values() if spec.policies()] == [
        "linear-scaling", "ada-scale"
    ]  # fmt: skip


# -- strategies


def ended(accuracy: float = 0.98, loss: float = 0.1, digest: str = "a", **more: Any) -> Outcome:
    values: dict[str, Any] = {"samples": 10, "seconds": 2.0, "steps": 3, "sent_bytes": 2500.0, "sent_messages": 4.0}
    values["staleness"] = []
    return Outcome(accuracy=accuracy, loss=loss, digest=digest, **(values | more))


def test_a_strategy_stands_beside_the_serial_run_of_the_same_seed() -> None:
    serial = [ended(0.98, 0.1), ended(0.96, 0.2)]
    runs = [ended(0.97, 0.1), ended(0.96, 0.22, staleness=[0, 3])]
    told = strategies.learned("diloco", 2, 0.1, runs, serial)
    assert told[2:] == ("0.1", "96.50%", "-0.50 (-1.00 … +0.00)", "0.1600", "+5.00 (+0.00 … +10.00)", "yes")
    assert strategies.costs("diloco", 2, runs) == ("diloco", "2", "2.5", "4.0", "5", "1.50, 3")
    assert strategies.learned("diloco", 2, 0.1, [None, ended(0.96, 0.2)], serial)[0] == "diloco (1 of 2 seeds)"
    assert strategies.learned("diloco", 2, 0.1, [ended(digest="b")] * 2, serial)[-1] == "no"
    assert set(strategies.learned("diloco", 2, 0.1, [None, None], serial)[3:]) == {"no number"}
    assert set(strategies.costs("diloco", 2, [None, None])[2:]) == {"no number"}


def test_a_strategy_is_shown_with_the_rate_that_is_best_for_it() -> None:
    slow, fast, lost = [ended(loss=0.3), ended(loss=0.3)], [ended(loss=0.1), ended(loss=0.2)], [ended(loss=0.05), None]
    assert strategies.best({1.0: slow, 2.0: fast}) == (2.0, fast)
    assert strategies.best({1.0: slow, 4.0: lost}) == (1.0, slow)
    assert strategies.best({1.0: slow[:1], 4.0: lost}) == (4.0, lost)  # with which it went on
    assert strategies.best({4.0: [None], 8.0: [None]})[1] == [None]


def test_traffic_per_step_is_read_from_rounds_or_from_what_workers_said_of_the_step_before(tmp_path: Path) -> None:
    apart, together = tmp_path / "apart.jsonl", tmp_path / "together.jsonl"
    rounds = [
        {"steps": 4, "sent": [[100, 1], [300, 3]], "staleness": [[0, 1], [2]]},
        {"steps": 1, "sent": [[50, 1], [50, 0]], "staleness": [[], [5]]},
    ]
    apart.write_text("".join(json.dumps({"round": one}) + "\n" for one in rounds) + json.dumps({"step": 9}) + "\n")
    assert Traffic.read(apart) == Traffic(100.0, 1.0, [0, 1, 2, 5])
    watched = [[(9, 9), (9, 9)], [(10, 1), (20, 2)], [(30, 1), (40, 4)]]  # the first is of no step
    together.write_text(
        "".join(
            json.dumps({"workers": [{"sent_bytes": sent, "sent_messages": count} for sent, count in one]}) + "\n"
            for one in watched
        )
    )
    assert Traffic.read(together) == Traffic(50.0, 4.0, [])


def test_workers_in_turns_have_gradients_as_stale_as_there_are_others() -> None:
    choice = stale.Choice(stale_epochs=2)
    fresh, old, slower = (
        stale.stale_accuracy(choice, stale.TREATED[way], 0.3, workers, seed=0)
        for way, workers in (("plain", 1), ("plain", 17), ("staleness-aware", 17))
    )
    assert fresh > slower > old
    judged = {(0.3, 1, "plain"): [fresh], (0.3, 17, "plain"): [old], (0.3, 17, "staleness-aware"): [slower]}
    assert [row[0] for row in stale.stale_grid(choice, 0.3, judged).rows] == [
        "serial",
        "plain, staleness 16",
        "staleness-aware, staleness 16",
    ]


# -- the coordinator --------------------------------------------------------------------------------------------------


def test_what_is_sent_and_kept_grows_with_the_number_of_workers_and_not_with_its_square() -> None:
    choice = coordinator.Choice(beats=1, losses=1)
    few, many = (coordinator.measured(workers, choice) for workers in (16, 64))
    for name in ("start", "regroup", "join"):
        for of_many, of_few in zip(many[name].sent + many[name].kept, few[name].sent + few[name].kept, strict=True):
            assert of_many < 4.5 * of_few, name
    assert many["beats"].sent == many["beats"].kept == [0]


# -- the coordinator's sockets ----------------------------------------------------------------------------------------


def test_every_worker_has_a_place_in_one_crowd_and_there_is_room_for_all_that_join() -> None:
    for workers, processes in ((1, 4), (16, 2), (1024, 4), (1021, 3)):
        choice = coordinator_sockets.Choice(workers=workers, processes=processes, joins=5)
        rooms = [room for crowd in choice.crowds for room in crowd.values()]
        assert len(choice.crowds) == processes
        assert len(rooms) == len({name for crowd in choice.crowds for name in crowd}) == choice.agents
        assert sum(rooms) >= choice.largest


def test_a_system_that_allows_too_few_files_is_told_what_to_do() -> None:
    with pytest.raises(TooFewFiles, match="1300 open files, and this system allows 1024: raise the hard limit"):
        allow_files(1300, (1024, 1024))
    allow_files(1300, (4096, 4096))
