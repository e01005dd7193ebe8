"""Policies that go by times and prices, on real workers whose times are known because they sleep."""

import json
from pathlib import Path
from typing import Any

import pytest

from outcomes import outcome, train
from serial_runs import SerialRuns

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm"), pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "timed.py"


def decided_by(policy: str, folder: Path, workers: str, serial_runs: SerialRuns) -> list[Any]:
    """Its decisions (step, policy, verb, value, why), with which one worker ends in the same bits."""
    ended = train(folder, "-n", workers, script=SCRIPT, settings={"POLICY": policy})
    digest, decided = outcome(folder, ended)
    told = json.dumps([[step, verb, value] for step, _, verb, value, _ in decided])
    assert digest == serial_runs(SCRIPT, POLICY="recorded", DECIDED=told).end()
    return decided


def values(decided: list[Any], verb: str) -> list[Any]:
    return [value for _, _, wanted, value, _ in decided if wanted == verb]


def test_goodput_goes_to_more_workers_and_larger_batches(serial_runs: SerialRuns, tmp_path: Path) -> None:
    decided = decided_by("goodput", tmp_path / "run", "1:4", serial_runs)
    assert 4 in values(decided, "resize")
    assert values(decided, "set_batch_size")[-1] == 64
    assert len(values(decided, "set_learning_rate")) >= 3
    assert values(decided, "stop") == [None]


def test_a_notice_leaves_a_checkpoint_and_brings_a_worker_that_goes_when_it_is_not_needed_any_more(
    serial_runs: SerialRuns, tmp_path: Path
) -> None:
    decided = decided_by("spot", tmp_path / "run", "1:3", serial_runs)
    resizes = [(step, value) for step, _, verb, value, why in decided if verb == "resize"]
    assert [value for _, value in resizes] == [3, 2]
    at_notice = {verb for step, _, verb, _, why in decided if step == resizes[0][0] and why.get("notices") == 1}
    assert at_notice == {"checkpoint", "resize"}
    assert (tmp_path / "run" / "journal.jsonl").read_text().count('"event": "observed"') == 3  # only news
