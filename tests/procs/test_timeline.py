"""Timelines of whole jobs, from `unisono run --timeline` to the trace that a viewer opens."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chrome_traces import require_sound
from commands import completed
from outcomes import train
from training import whole_lines
from unisono.spans import Kind
from unisono_lab.recorded.worker_spans import StepTimelines, read

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm")]

SCRIPT = Path(__file__).parent / "scripts" / "small_training.py"
STEPS = 40
PATIENCE_S = 150.0
NEAR_S = 1e-8
"""Moments are rounded to nanoseconds."""

ONCE: tuple[Kind, ...] = ("data", "compute", "exposed", "exchange", "update", "step")


def shown(folder: Path, *options: object) -> str:
    ended = completed("timeline", folder, *options, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def trained(folder: Path, *options: str, **settings: str) -> StepTimelines:
    """A run with a timeline; its buckets are small, and reduced beside the computation."""
    ended = train(folder, *options, "--timeline", script=SCRIPT, settings={"UNISONO_OVERLAP": "1", **settings})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return read([folder])


def require_whole(folder: Path, timelines: StepTimelines, workers: int) -> None:
    """Each step is there on each worker, with each bucket once, and its times are those of metrics.jsonl."""
    assert sorted(timelines.by_step) == list(range(STEPS))
    lines = {line["step"]: line for line in whole_lines(folder / "metrics.jsonl")}
    for number, step in timelines.by_step.items():
        assert sorted(each.rank for each in step.values()) == list(range(workers))
        for each in step.values():
            buckets = Counter(span.number for span in each.all("reduce"))
            assert set(buckets.values()) == {1}
            assert [len(each.all(kind)) for kind in ("data", "compute", "exposed", "exchange", "update", "step")] == [
                1
            ] * 6
        (main,) = (each for each in step.values() if each.rank == 0)
        told = lines[number]["seconds"]
        assert main.seconds("compute") == pytest.approx(told["compute"], abs=NEAR_S)
        assert main.seconds("exposed") == pytest.approx(told["exposed_communication"], abs=NEAR_S)
        assert main.seconds("update") == pytest.approx(told["update"], abs=NEAR_S)
        passes = main.seconds("forward") + main.seconds("backward")
        assert 0 < passes <= told["compute"] + NEAR_S
    assert sum(len(step.all("forward")) for step in timelines.by_step[3].values()) == 7


@pytest.mark.slow
def test_a_slow_worker_is_named_and_the_trace_agrees_with_the_metrics(tmp_path: Path) -> None:
    folder, faults = tmp_path / "run", tmp_path / "faults.toml"
    faults.write_text("[[fault]]\nkind = 'slow'\nrank = 1\nat_step = 1\nfactor = 3\n")

    timelines = trained(folder, "-n", "2", "--faults", str(faults))
    told = shown(folder, "--plot", tmp_path / "step.svg")

    require_whole(folder, timelines, 2)
    trace = json.loads((folder / "timeline.json").read_text())
    require_sound(trace)
    assert {event["tid"] for event in trace["traceEvents"] if event["name"] == "reduce bucket 0"} == {2}
    assert "exposed communication" in told
    assert "Worker 1 on host" in told
    assert "times slower in compute than the others" in told
    assert "critical path" in (tmp_path / "step.svg").read_text()


@pytest.mark.slow
def test_workers_that_die_and_join_show_how_the_others_regroup(tmp_path: Path) -> None:
    folder, faults = tmp_path / "run", tmp_path / "faults.toml"
    plan = (("kill", "rank = 1\nat_step = 6\n"), ("join", "at_step = 12\n"))
    faults.write_text("".join(f"[[fault]]\nkind = '{kind}'\n{about}" for kind, about in plan))

    timelines = trained(folder, "-n", "1:3", "--faults", str(faults), PACE_S="0.02")
    values = json.loads(shown(folder, "--json"))

    assert values["of"] > 1
    assert sorted(timelines.by_step) == list(range(STEPS))
    trace: Any = json.loads((folder / "timeline.json").read_text())
    require_sound(trace)
    kinds = Counter(event["cat"].partition(",")[0] for event in trace["traceEvents"] if event["ph"] == "X")
    assert kinds["regroup"] >= 2
    assert kinds["regroup"] == kinds["wait"] == kinds["form"] == kinds["copy"]
    assert all(worker.looks for worker in timelines.workers if len(worker.steps) > 5), "they ask for the time"
    ahead = [look for worker in timelines.workers for look in worker.looks]
    assert all(abs(look.ahead) <= look.within for look in ahead), "the coordinator is on the same host"


@pytest.mark.slow
def test_torchs_own_events_stand_in_the_same_trace(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    trained(folder, "-n", "1", "--profile", "3:5", UNISONO_STOP_AFTER="6")
    shown(folder)

    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    times = {event["name"]: event for event in events if event["ph"] == "X"}
    products = [event for event in events if event["name"] == "aten::addmm"]
    assert products
    begun, ended = times["step 3"]["ts"], times["step 4"]["ts"] + times["step 4"]["dur"]
    assert all(begun <= event["ts"] <= ended for event in products)


STAGED = """
import torch
from torch import nn
import unisono

run = unisono.init(batch_size=8, shards=4, seed=0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
model = run.pipeline(model, cuts=["2"])
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(64, 4))
for step in run.steps(data, epochs=1):
    step.run(lambda model, batch: model(batch[0]).square().mean())
run.finish(model)
"""


@pytest.mark.slow
def test_each_device_of_a_model_in_stages_has_the_passes_of_its_blocks(tmp_path: Path) -> None:
    folder, script = tmp_path / "run", tmp_path / "staged.py"
    script.write_text(STAGED)
    ended = train(folder, "-n", "2", "--devices-per-worker", "2", "--timeline", script=script)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    timelines = read([folder])

    assert sorted(timelines.by_step) == list(range(8))
    for step in timelines.by_step.values():
        assert sorted(each.rank for each in step.values()) == [0, 0, 1, 1]
        for each in step.values():
            assert each.shards == 2
            (compute,) = each.all("compute")
            forward, backward = each.all("forward"), each.all("backward")
            assert [len(forward), len(backward)] == [2, 2]
            assert {span.number for span in forward} == {span.number for span in backward}
            assert all(compute.begun <= span.begun <= span.ended <= compute.ended for span in (*forward, *backward))
    assert "with 2 workers of 2 devices" in shown(folder)
