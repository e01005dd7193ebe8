"""Scripts that steer, are struck, or do more than train: whatever happens to their workers, bits and figures stay."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from script_cluster import Cluster, Done, Flip, Kill
from unisono.checkpoint.folder import UNPROVEN, RunFolder
from unisono.launch.outcome import mended

pytestmark = pytest.mark.cluster

SCRIPTS = Path(__file__).parents[1] / "procs" / "scripts"
STEERED, TROUBLED, NEARLY_ALL = (SCRIPTS / f"{name}.py" for name in ("steered", "troubled", "elastic_training"))
OWN_RATES = SCRIPTS / "own_rates.py"
SHARDS = 8
"""Of each of these jobs."""

STEPS, LOOPS_END = 40, (30, 35, 40)
"""Of the script that has nearly everything, and how many there have been when each of its loops ends."""


class Jobs:
    """Runs scripts, and keeps what one undisturbed worker makes of each."""

    def __init__(self, folder: Path) -> None:
        self._cluster, self._serial = Cluster(folder), dict[str, Done]()

    def __call__(self, script: Path, workers: int | tuple[int, int], **how: Any) -> Done:
        return self._cluster(script, workers, shards=SHARDS, PACE_S="0", **how)

    def serial(self, script: Path, **settings: str) -> Done:
        name = json.dumps([str(script), settings])
        if name not in self._serial:
            self._serial[name] = self(script, 1, **settings)
        return self._serial[name]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


def at(place: str, step: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"place": place, "step": step, "rank": rank, **more}


def told(faults: Sequence[dict[str, Any]]) -> str:
    return json.dumps(list(faults))


# -- a policy that changes everything that can be changed


@pytest.mark.slow
def test_workers_topology_and_batch_change_twenty_times_and_the_bits_stay(jobs: Jobs) -> None:
    serial, done = jobs.serial(STEERED), jobs(STEERED, (3, 5))
    assert len([verb for _, _, verb, _, _ in serial.decided if verb == "set_topology"]) >= 20
    assert done.outcome == serial.outcome
    assert len(done.world.formed) >= 20


@pytest.mark.slow
def test_workers_topology_and_batch_change_with_kills_between_and_the_bits_stay(jobs: Jobs) -> None:
    kills = [Kill(9, 0), Kill(22, 1, 3), Kill(33, 0, 2), Kill(47, 1, 5), Kill(70, 0, 20)]
    done = jobs(STEERED, (1, 5), kills=kills)
    assert done.outcome == jobs.serial(STEERED).outcome
    assert done.world.struck == len(kills)


@pytest.mark.slow
def test_what_is_decided_behind_an_update_in_which_the_main_worker_is_lost_is_in_the_journal(jobs: Jobs) -> None:
    kills = [Kill(9 + 9 * number, 0, points) for number, points in enumerate(range(8, 26, 3))]
    done = jobs(STEERED, (3, 5), kills=kills)
    assert done.outcome == jobs.serial(STEERED).outcome
    assert done.world.struck == len(kills)


# -- workers that hold a wrong bit, and scripts that ask for others


@pytest.mark.parametrize("workers", [3, 5])
def test_a_worker_with_a_wrong_bit_is_named_and_healed_before_it_does_harm(workers: int, jobs: Jobs) -> None:
    trouble = [{"what": "bit flip", "rank": 1, "step": 7}, {"what": "bit flip", "rank": 0, "step": 12}]
    done = jobs(TROUBLED, workers, TROUBLE=told(trouble))
    assert done.outcome == jobs.serial(TROUBLED).outcome
    assert [(line["step"], line["ranks"]) for line in done.journal("healed")] == [(7, [1]), (12, [0])]


def test_two_workers_that_cannot_tell_who_is_wrong_go_back_and_end_in_the_right_bits(jobs: Jobs) -> None:
    trouble = [{"what": "bit flip", "rank": 1, "step": 7}]
    done = jobs(TROUBLED, 2, TROUBLE=told(trouble), UNISONO_VERIFY_EVERY="3")
    assert done.outcome == jobs.serial(TROUBLED).outcome
    assert [(line["step"], line["to"]) for line in done.journal("rolled back")] == [(7, 6)]


def test_workers_that_differ_by_what_the_script_does_are_no_fault_of_the_memory(tmp_path: Path) -> None:
    done = Cluster(tmp_path)(OWN_RATES, 3, shards=4)
    assert {rank for line in done.journal("healed") for rank in line["ranks"]} == {2}
    said = mended(RunFolder(done.folder))
    assert f"the states of workers differed, {UNPROVEN}" in said
    assert "faults of" not in said


@pytest.mark.parametrize(("workers", "is_proven"), [(1, True), (2, False)])
def test_a_flip_is_called_one_where_a_worker_finds_it_in_its_own_memory(
    workers: int, is_proven: bool, jobs: Jobs
) -> None:
    done = jobs(TROUBLED, workers, flips=[Flip(7)])
    assert done.outcome == jobs.serial(TROUBLED).outcome
    assert [line["proven"] for line in done.journal("rolled back")] == [is_proven]
    said = mended(RunFolder(done.folder))
    assert ("faults of memory or processors were found and mended: 1 rolled back" in said) is is_proven
    assert (f"the states of workers differed, {UNPROVEN}: 0 healed, 1 rolled back" in said) is not is_proven


def test_a_script_asks_for_another_size(jobs: Jobs) -> None:
    trouble = [{"what": "resize", "rank": 0, "step": 2, "to": 3}, {"what": "resize", "rank": 0, "step": 20, "to": 1}]
    done = jobs(TROUBLED, (1, 3), TROUBLE=told(trouble))
    assert done.outcome == jobs.serial(TROUBLED).outcome
    assert [len(names) for names in done.world.formed] == [1, 3, 1]


def test_what_is_measured_of_the_gradients_goes_over_to_those_who_come(jobs: Jobs) -> None:
    watched = {"UNISONO_MONITOR_EVERY": "1"}
    trouble = [
        {"what": "resize", "rank": 0, "step": 2, "to": 3},
        {"what": "kill", "rank": 0, "step": 20},
        {"what": "kill", "rank": 0, "step": 24},
    ]
    done = jobs(TROUBLED, (1, 3), TROUBLE=told(trouble), **watched)
    assert done.metrics == jobs.serial(TROUBLED, **watched).metrics
    assert any("noise_scale" in line for line in done.metrics.values())
    assert done.world.struck == 2


# -- a script with two updates in a batch, three loops, and calls between


def require_same(done: Done, serial: Done, struck: int) -> None:
    assert done.outcome == serial.outcome
    assert done.world.struck == struck
    assert done.said == serial.said


@pytest.mark.slow
def test_killing_all_but_one_worker_anywhere_in_a_step_changes_no_bit(jobs: Jobs) -> None:
    places = ["first", "between", "second", "after"]
    faults = [at(place, 2 + 5 * number, number % 2) for number, place in enumerate(places)]
    require_same(jobs(NEARLY_ALL, 5, FAULTS=told(faults)), jobs.serial(NEARLY_ALL), len(faults))


def test_killing_workers_between_the_steps_changes_no_bit(jobs: Jobs) -> None:
    faults = [at("evaluate", 4, 1), at("sum", 9, 0), at("predict", 14, 1)]  # the last steps of epochs
    require_same(jobs(NEARLY_ALL, 4, FAULTS=told(faults)), jobs.serial(NEARLY_ALL), len(faults))


def test_the_main_worker_is_lost_while_it_captures_a_checkpoint(jobs: Jobs) -> None:
    faults = [at("capture", 8), at("capture", 16), at("capture", STEPS)]
    done = jobs(NEARLY_ALL, 2, FAULTS=told(faults), UNISONO_CHECKPOINT_EVERY="8")
    require_same(done, jobs.serial(NEARLY_ALL), len(faults))
    assert done.journal("checkpoint")[-1]["step"] == STEPS
    assert done.journal("finished")[-1]["step"] == STEPS


def test_workers_die_in_each_loop_and_in_each_evaluation_and_others_take_their_places(jobs: Jobs) -> None:
    second, third, last = LOOPS_END
    faults = [
        at("in evaluate", 0, 1),
        at("after", 3, 0),
        at("in evaluate", second, 1),
        at("begin", second + 2, 0),
        at("in evaluate", third, 0),
        at("after", third + 2, 1),
        at("in evaluate", last, 0),
    ]
    require_same(jobs(NEARLY_ALL, 3, FAULTS=told(faults)), jobs.serial(NEARLY_ALL), len(faults))


@pytest.mark.parametrize(("workers", "before_its_end"), [(2, 6), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_a_loop_that_is_left_early_while_a_joiner_comes_is_left_by_all(
    workers: int, before_its_end: int, jobs: Jobs
) -> None:
    early = {"STOP_BELOW": "1.5", "EPOCHS": "40"}
    serial = jobs.serial(NEARLY_ALL, **early)
    left = len(serial.metrics) - 10  # the last of the first loop; two of five steps each follow
    assert 12 < left < 150, "it is meant to stop early, but not at once"
    faults = [at("begin", left - before_its_end, signal=f"resize {workers + 1}")]
    done = jobs(NEARLY_ALL, (workers, workers + 1), FAULTS=told(faults), **early)
    assert done.outcome == serial.outcome
    assert done.said == serial.said


def test_state_of_the_scripts_own_goes_over_to_those_who_come_when_all_others_go(jobs: Jobs) -> None:
    faults = [at("begin", 1, signal="resize 2", size=1), at("begin", 2, signal="SIGTERM", size=2, behind=0)]
    done = jobs(NEARLY_ALL, (1, 2), FAULTS=told(faults))
    assert done.outcome == jobs.serial(NEARLY_ALL).outcome
    assert not set(done.world.formed[-1]) & set(done.world.formed[0])
    assert done.said == jobs.serial(NEARLY_ALL).said


@pytest.mark.parametrize(("workers", "again", "step"), [pytest.param(1, 3, 32, marks=pytest.mark.slow), (5, 2, 17)])
def test_a_job_that_is_cut_short_in_a_loop_goes_on_to_the_same_bits_on_other_workers(
    workers: int, again: int, step: int, jobs: Jobs
) -> None:
    cut = jobs(NEARLY_ALL, workers, UNISONO_STOP_AFTER=f"{step}", UNISONO_CHECKPOINT_EVERY="7")
    assert [line["step"] for line in cut.journal("checkpoint")][-1] == step
    done = jobs(NEARLY_ALL, again, folder=cut.folder)
    assert done.outcome == jobs.serial(NEARLY_ALL).outcome
