"""Policies that go by times and prices, on real workers whose times are known because they sleep."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launches import Launches
from outcomes import outcome, train
from serial_runs import SerialRuns

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm")]

SerialWith = Callable[[list[Any]], str]

SCRIPT = Path(__file__).parent / "scripts" / "timed.py"


def decided_by(policy: str, folder: Path, *options: str) -> tuple[str, list[Any]]:
    """The digest, and the decisions: step, policy, verb, value, why."""
    return outcome(folder, train(folder, *options, script=SCRIPT, settings={"POLICY": policy}))


@pytest.fixture
def serial_with(serial_launches: Launches, serial_runs: SerialRuns) -> SerialWith:
    """The digest of one worker that decides the same at the same steps."""

    def run(decided: list[Any]) -> str:
        told = json.dumps([[step, verb, value] for step, _, verb, value, _ in decided])
        return serial_runs(SCRIPT, POLICY="recorded", DECIDED=told).end()

    return run


def values(decided: list[Any], verb: str) -> list[Any]:
    return [value for _, _, wanted, value, _ in decided if wanted == verb]


@pytest.mark.slow
def test_scaling_stays_with_the_number_of_workers_that_pays(serial_with: SerialWith, tmp_path: Path) -> None:
    digest, decided = decided_by("scaling", tmp_path / "run", "-n", "1:4")
    resizes = values(decided, "resize")  # the job begins with as many workers as there are cores for
    assert 4 in resizes
    assert resizes[-1] == 2
    assert values(decided, "stop") == [None]
    assert digest == serial_with(decided)


@pytest.mark.slow
def test_goodput_goes_to_more_workers_and_larger_batches(serial_with: SerialWith, tmp_path: Path) -> None:
    digest, decided = decided_by("goodput", tmp_path / "run", "-n", "1:4")
    assert 4 in values(decided, "resize")
    assert values(decided, "set_batch_size")[-1] == 64
    assert len(values(decided, "set_learning_rate")) >= 3
    assert values(decided, "stop") == [None]
    assert digest == serial_with(decided)


@pytest.mark.slow
def test_a_notice_leaves_a_checkpoint_and_brings_a_worker_that_goes_when_it_is_not_needed_any_more(
    serial_with: SerialWith, tmp_path: Path
) -> None:
    digest, decided = decided_by("spot", tmp_path / "run", "-n", "1:3")
    resizes = [(step, value) for step, _, verb, value, why in decided if verb == "resize"]
    assert [value for _, value in resizes] == [3, 2]
    at_notice = {verb for step, _, verb, _, why in decided if step == resizes[0][0] and why.get("notices") == 1}
    assert at_notice == {"checkpoint", "resize"}
    assert (tmp_path / "run" / "journal.jsonl").read_text().count('"event": "observed"') == 3  # only news
    assert digest == serial_with(decided)
