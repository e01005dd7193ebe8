"""Spans of a job whose worker is killed, by the standard variable of OpenTelemetry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from training import Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.slow]


def spans_in(log: Path) -> Iterator[dict[str, Any]]:
    """Those that OpenTelemetry's console exporter has printed among a worker's lines."""
    text, decoder = log.read_text(), json.JSONDecoder()
    place = text.find('{\n    "name": "unisono.')
    while place >= 0:
        found, place = decoder.raw_decode(text, place)
        yield found
        place = text.find('{\n    "name": "unisono.', place)


def test_workers_that_are_left_tell_of_the_regroup_the_hand_over_and_checkpoints(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    fault = {"rank": 2, "step": 5, "place": "between"}
    options = ("-n", "3", "--max-restarts", "1", "--checkpoint-every", "4")
    job = Training(tmp_path / "run", *options, faults=[fault], PACE_S="0", OTEL_TRACES_EXPORTER="console")
    started.append(job)
    assert job.end() == serial.end()
    (lost,) = job.journal("lost")
    left = {log.stem: list(spans_in(log)) for log in (tmp_path / "run" / "logs").glob("w*.log")}
    assert lost["worker"] in left
    for worker, found in left.items():
        regroups = [one["attributes"] for one in found if one["name"] == "unisono.regroup"]
        if worker in ("w1", "w2", "w3") and worker != lost["worker"]:
            assert any(one["unisono.lost"] and one["unisono.generation"] >= 2 for one in regroups), worker
        for one in found:
            assert one["status"]["status_code"] == "UNSET", one
    named = [one for found in left.values() for one in found]
    assert {one["name"] for one in named} == {"unisono.regroup", "unisono.hand_over", "unisono.checkpoint"}
    written = {line["step"]: line["bytes"] for line in job.journal("checkpoint")}
    told = {
        one["attributes"]["unisono.step"]: one["attributes"] for one in named if one["name"] == "unisono.checkpoint"
    }
    assert {step: one["unisono.bytes"] for step, one in told.items()} == written
