"""The schedules of stages: their ideal bubbles, what is read of runs, and how runs are started."""

import json
from pathlib import Path

import pytest

from unisono.errors import JobError
from unisono.launch.settings import Script
from unisono_lab.study.engines import ScheduleFigures, ScheduleStudy, _figures, _Run, ideal_bubble, table_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("schedule", "blocks", "share"),
    [
        ("gpipe", 2, 1 / 5),
        ("1f1b", 2, 1 / 5),
        ("interleaved-1f1b", 4, 1 / 9),
        ("looped-bfs", 4, 1 / 9),
        ("interleaved-zero-bubble", 4, 1 / 25),
    ],
)
def test_the_ideal_bubble_of_two_devices_and_four_shards(schedule: str, blocks: int, share: float) -> None:
    assert ideal_bubble(schedule, 2, 4, blocks) == pytest.approx(share)


def test_a_runs_figures_leave_its_first_steps_out(tmp_path: Path) -> None:
    steps = [{"step": number, "seconds": {"total": 9.0 if number < 2 else 0.5}} for number in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    for device, busy_s in enumerate((0.3, 0.1)):
        about = {"devices": 2, "blocks": 2, "shards": 4, "passes_s": 0.4}
        lines = [about | {"step": number, "busy_s": 0.0 if number < 2 else busy_s} for number in range(5)]
        (tmp_path / f"stages-{device}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = _figures("1f1b", [_Run.of(tmp_path, 2)], "")
    assert (found.step_s, found.ideal) == ([0.5], 0.2)
    assert found.idle == pytest.approx([0.25, 0.75])
    rows = table_of([found, ScheduleFigures("gpipe", trouble="it failed")])
    assert rows[1:] == [("1f1b", "500.0 ms", "1.000", "25% 75%", "50.0%", "20.0%"), ("gpipe", *5 * "-")]


def test_a_run_without_stages_has_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no measured step of a model in stages: it must call run\.pipeline"):
        _Run.of(tmp_path, 0)


def test_a_schedule_is_measured_on_one_worker_of_several_devices() -> None:
    study = ScheduleStudy(Script("train.py"), 3, steps=10, warmup=2)
    found = study.settings("gpipe")
    assert (found.workers, found.devices) == (1, 3)
    assert found.extra_environment["UNISONO_STAGE_SCHEDULE"] == "gpipe"
    assert found.extra_environment["UNISONO_STOP_AFTER"] == "12"
    with pytest.raises(JobError, match="--stages 1: needs at least 2 devices"):
        ScheduleStudy(Script("train.py"), 1).check()
