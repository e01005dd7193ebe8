"""The figures of a run, from what it wrote down."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from measured import line, write
from unisono.errors import JobError
from unisono_lab.study.measured_run import measured_run, plain_run, step_times, timed_part

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("steps", "warmup", "part"),
    [
        (8, 2, (4, 8)),  # two whole epochs: the second one
        (10, 2, (4, 8)),  # and none that is not whole
        (12, 5, (5, 12)),
        (7, 2, (2, 7)),  # there is but one whole epoch
        (3, 2, (2, 3)),
        (8, 8, (8, 8)),
    ],
)
def test_the_first_epoch_and_the_first_steps_are_not_timed(steps: int, warmup: int, part: tuple[int, int]) -> None:
    assert timed_part([line(step) for step in range(steps)], warmup) == part


def test_samples_seconds_and_epochs_are_those_of_the_timed_steps(tmp_path: Path) -> None:
    lines = [line(step, total=100 if step < 4 else 0.5 + 0.25 * (step // 4)) for step in range(12)]
    found = measured_run(write(tmp_path, lines), warmup_steps=2)
    assert (found.samples, found.trained, found.batch_size, found.threads) == (80, 120, 10, 1)
    assert found.seconds == 4 * 0.75 + 4 * 1.0
    assert found.epoch_s == 3.5  # the median of 3 and 4
    assert (found.learning_rate, found.digest, found.epoch_samples) == (0.1, "ab", 40)


def test_a_run_with_nothing_left_to_time_is_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"3 steps were taken, and the first 3 are left out \(--warmup\)"):
        measured_run(write(tmp_path, [line(step) for step in range(3)]), warmup_steps=3)


def test_the_rate_is_what_policies_made_of_it_and_the_accuracy_the_last_one(tmp_path: Path) -> None:
    lines = [line(0), line(1, learning_rate=0.3), {"step": 2, "accuracy": 0.4}, {"step": 2, "accuracy": 0.5}]
    found = measured_run(write(tmp_path, lines), warmup_steps=0)
    assert (found.learning_rate, found.accuracy) == (0.3, 0.5)


def test_the_memory_is_that_of_the_worker_that_needed_most_on_its_device_if_it_has_one(tmp_path: Path) -> None:
    on_host = [{"device": "cpu", "peak_memory_mib": most, "peak_device_memory_mib": None} for most in (3.0, 5.0)]
    assert measured_run(write(tmp_path, [line(0)], workers=on_host), 0).peak_memory_mib == 5.0
    on_gpu = [{"device": "cuda:0", "peak_memory_mib": 9.0, "peak_device_memory_mib": 2.0}]
    assert measured_run(write(tmp_path, [line(0)], workers=on_gpu), 0).peak_memory_mib == 2.0
    assert measured_run(write(tmp_path, [line(0)]), 0).peak_memory_mib is None


@pytest.mark.parametrize(
    ("devices", "cores", "is_so"),
    [(["cpu"] * 2, 2, False), (["cpu"] * 3, 2, True), (["cuda:0", "cuda:1"], 1, False), (["cuda:0"] * 2, 9, True)],
)
def test_workers_that_share_a_core_or_a_gpu_are_too_many(
    devices: list[str], cores: int, is_so: bool, tmp_path: Path
) -> None:
    found = measured_run(write(tmp_path, [line(0)], workers=[{"device": each} for each in devices]), 0)
    assert found.is_oversubscribed(cores) is is_so


def test_the_loss_is_taken_after_the_same_samples_whatever_the_batch(tmp_path: Path) -> None:
    small = measured_run(write(tmp_path / "a", [line(step) for step in range(40)]), 0)
    large = measured_run(write(tmp_path / "b", [line(step, size=20) for step in range(40)]), 0)
    assert small.loss_at(400) == pytest.approx(9 - 37.5)  # steps 36 to 39
    assert large.loss_at(400) == pytest.approx(9 - 18.5)  # steps 18 and 19
    assert small.loss_at(5) is None
    assert math.isnan(measured_run(write(tmp_path / "d", [line(0) | {"loss": None}]), 0).loss_at(10) or 0.0)
    huge = measured_run(write(tmp_path / "c", [line(step, size=160) for step in range(4)]), 0)
    assert huge.loss_at(400) == 9 - 1  # none ends in the last tenth: the last one before


def workers(*shard_s: float, data_s: float = 0.0, exposed_s: float = 0.0) -> dict[str, Any]:
    each = [{"shard_s": one, "data_s": data_s, "exposed_s": exposed_s, "update_s": 0.25} for one in shard_s]
    return {"workers": each, "setting": {"shards": 2 * len(each)}}


ALONE = {"step_s": 1.0, "data_s": 0.1, "compute_s": 0.5, "wait_s": 0.0, "exposed_s": 0.2, "update_s": 0.1}


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        # 2 and 6 for two shards each; of 4 and 0, 1 and 5 of the waiting are for the slowest, and for communication
        (workers(1.0, 3.0), workers(9.0, 9.0, data_s=0.5, exposed_s=5.0), (4.0, 2.0, 3.0, 0.5)),
        (workers(1.0, 3.0), workers(1.0, 1.0, exposed_s=1.0), (4.0, 0.5, 0.5, 0.0)),  # no longer than it waits
        (workers(1.0, 1.0, 0.0), workers(1.0, 1.0, 0.0, exposed_s=9.0), (2.0, 1.0, 8.0, 0.0)),  # who serves has none
        (workers(1.0, 2.0) | {"losses": [1.0, 2.0], "seconds": {"compute": 4.0, "total": 9.0}}, workers(1.0, 1.0),
         (6.0, 0.0, 0.0, 0.0)),  # both calls took as long as the first
    ],
)  # fmt: skip
def test_a_step_is_computing_waiting_for_the_slowest_and_communication(
    first: dict[str, Any], second: dict[str, Any], parts: tuple[float, ...]
) -> None:
    (found,) = step_times([line(0) | first, line(1) | second])
    assert (found["compute_s"], found["wait_s"], found["exposed_s"], found["data_s"]) == parts
    assert found["update_s"] == 0.25
    assert step_times([line(0)]) == [ALONE]  # where workers tell nothing the main worker does


def test_a_plain_loop_tells_its_epochs_in_lines_of_json(tmp_path: Path) -> None:
    log = tmp_path / "log"
    told = [{"epoch": number, "seconds": 3.0 - number, "samples": 50, "loss": 1.0 / (1 + number)} for number in (0, 1)]
    log.write_text("hello\n{\n" + "".join(f" 10 % {json.dumps(one)}\n" for one in told) + '{"other": 1}\n')
    found = plain_run(log)
    assert (found.samples, found.seconds, found.trained, found.epoch_s, found.times) == (50, 2.0, 100, 2.0, None)
    assert (found.loss_at(100), found.epoch) == (0.5, None)
    log.write_text(json.dumps(told[0]))
    assert (plain_run(log).seconds, plain_run(log).epoch) == (3.0, 1)


def test_a_plain_loop_that_tells_nothing_is_told_how(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("epoch 0 took 3 s\n")
    with pytest.raises(JobError, match=r'no line such as \{"epoch": 0, "seconds": 1.2, "samples": 1437\}'):
        plain_run(log)
    log.write_text('{"epoch": 0, "seconds": 0, "samples": 5}\n')
    with pytest.raises(JobError, match="line 1: .* have to be numbers above 0"):
        plain_run(log)
