"""/metrics: what Prometheus reads of a job, and whether the dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from unisono.membership import state as machine
from unisono.membership.exposition import exposition, newest_line
from unisono.membership.messages import AgentHello, Formed, Progress, Pulse, Ready, WorkerHello
from unisono.membership.state import AgentMessage, ElasticConfig, WorkerMessage

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "docs" / "grafana" / "unisono.json"
PROMTOOL = shutil.which("promtool")
LINE: dict[str, Any] = {
    "time": 1.5,
    "step": 41,
    "epoch": 2,
    "position": 328,
    "batch_size": 8,
    "loss": 0.5,
    "lr": 0.01,
    "generation": 1,
    "world_size": 2,
    "seconds": {"total": 0.25, "exposed_communication": 0.05},
    "samples_per_s": 32.0,
    "accuracy": 0.75,
    "ends_epoch": True,
}


def training() -> machine.State:
    """Two workers train, and have told how far they are."""
    state = machine.State(ElasticConfig(smallest=1, largest=4, failure_timeout_s=60.0))
    events: list[machine.Event] = [AgentMessage("a1", AgentHello(agent="a1", host="here", workers=2))]
    for name in ("w1", "w2"):
        events += [
            WorkerMessage((name,), WorkerHello(worker=name, host="h1", pid=1, shards=8)),
            WorkerMessage((name,), Ready()),
        ]
    for name in ("w1", "w2"):
        pulse = Pulse(doing="call", still_s=0.125)
        formed = Formed(generation=1, seconds={"regroup": 0.5, "form": 0.25})
        events += [
            WorkerMessage((name,), formed),
            WorkerMessage((name,), Progress(acts=42, step=42, samples_per_s=32.0, pulse=pulse)),
        ]
    for now, event in enumerate(events):
        state, _ = machine.step(state, event, float(now))
    assert len(state.members) == 2
    return state


def values(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_state_of_the_job_and_its_newest_step_are_there() -> None:
    found = values(exposition(training(), LINE, "1.2"))
    assert found["unisono_info", ("1.2",)] == 1
    assert found["unisono_step", ()] == 42
    assert found["unisono_workers", ("working",)] == 2
    assert found["unisono_job_phase", ("training",)] == 1
    assert found["unisono_samples_per_second", ()] == 32
    assert found["unisono_regroup_duration_seconds", ("regroup",)] == 0.5
    assert found["unisono_worker_still_seconds", ("h1", "w2")] == 0.125
    assert found["unisono_loss", ()] == 0.5
    assert found["unisono_step_duration_seconds", ("exposed_communication",)] == 0.05
    assert {key: value for key, value in found.items() if key[0] == "unisono_logged"} == {
        ("unisono_logged", ("accuracy",)): 0.75
    }


def test_a_line_that_is_older_than_what_workers_say_is_left_out() -> None:
    """Workers of other hosts may write elsewhere."""
    found = values(exposition(training(), {**LINE, "step": 40}, "1.2"))
    assert ("unisono_loss", ()) not in found
    assert found["unisono_step", ()] == 42


def test_a_job_that_has_not_begun_can_be_scraped() -> None:
    state = machine.State(ElasticConfig(smallest=1, largest=4, failure_timeout_s=60.0))
    assert values(exposition(state, None, "1.2"))["unisono_job_phase", ("forming",)] == 1


HOSTILE = (
    b"[1]\n",
    b'{"loss": 1}\n',
    b'{"loss": 1, "step": "1"}\n',
    b'{"loss": ' + b"[" * 50_000 + b"\n",
    b'{"loss": 1, "step": 1, "' + b"x" * 2**19 + b'": 1}\n',
    b"\xff\xfe loss\n",
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_damaged_file_of_metrics_is_no_line(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(text)
    assert newest_line(tmp_path) is None


def test_figures_of_the_script_and_parts_of_a_step_are_bounded_in_number_and_length(tmp_path: Path) -> None:
    many = {f"figure {number}": number for number in range(500)}
    odd = {"x" * 500: 1, "\ud800": 1, "a\nb": 1, "huge": 10**400, "text": "1", "list": [1], "endless": float("inf")}
    seconds = {"\ud800": 1.0, "a\nb": 1.0, "x" * 500: 1.0, "total": 0.5, **{f"part {one}": 1.0 for one in range(500)}}
    told = {**LINE, **odd, **many, "seconds": seconds}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(told) + '\n{"step": 42, "beside": 1}\n{"st')
    line = newest_line(tmp_path)
    assert line is not None
    assert line["step"] == 41
    found = values(exposition(training(), line, "1.2"))
    logged, parts = (
        [labels for name, labels in found if name == of] for of in ("unisono_logged", "unisono_step_duration_seconds")
    )
    assert len(logged) == len(parts) == 64
    assert ("total",) in parts
    assert not {("huge",), ("text",), ("list",), ("a\nb",)} & set(logged)


def queries() -> list[str]:
    """Those of the dashboard's panels."""
    board = json.loads(BOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_every_query_of_the_dashboard_asks_for_metrics_that_there_are_and_all_of_them_are_shown() -> None:
    there = {name for name, _ in values(exposition(training(), LINE, "1.2"))}
    asked = {name for query in queries() for name in re.findall(r"unisono_\w+", query)}
    assert asked - there == set()
    assert there - asked == {"unisono_info", "unisono_workers_smallest"}
    labels = {label for query in queries() for label in re.findall(r"(\w+)=~?\"", query)}
    assert labels <= {"job", "phase", "part"}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: make prometheus")
def test_promtool_finds_nothing_wrong_with_names_units_and_queries(tmp_path: Path) -> None:
    text = exposition(training(), LINE, "1.2")
    checked = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries())]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))  # JSON is YAML
    checked = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(tmp_path / "rules.json")], capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
