"""Policies change everything that can be changed, over and over, while real workers come and die.

Any number of workers, and kills at other places: ``tests/unit/test_scripts_of_clusters.py``.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from outcomes import outcome, outcome_in, train
from serial_runs import SerialRuns

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm")]

SCRIPT = Path(__file__).parent / "scripts" / "steered.py"
OVER_MESSAGES = {"UNISONO_TRANSPORT": "sockets"}


@pytest.fixture(scope="session")
def serial(serial_runs: SerialRuns) -> tuple[str, list[Any]]:
    digest, decided = outcome_in(serial_runs(SCRIPT).run_dir)
    assert len([verb for _, _, verb, _, _ in decided if verb == "set_topology"]) >= 20
    return digest, decided


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_topology_and_batch_change_twenty_times_and_the_bits_stay(
    serial: tuple[str, list[Any]], tmp_path: Path
) -> None:
    folder, workers = tmp_path / "run", 3
    assert outcome(folder, train(folder, "-n", f"{workers}", script=SCRIPT, settings=OVER_MESSAGES)) == serial
    measured = [line["links"] for line in lines(folder) if "links" in line]
    assert len(measured) > 5
    assert all(len(links["latency_s"]) == workers for links in measured)
    assert all(len(line["workers"]) == workers for line in lines(folder))
    assert all(each["sent_bytes"] > 0 for line in lines(folder)[1:] for each in line["workers"])


@pytest.mark.slow  # workers that are threads show it in each suite
def test_workers_topology_and_batch_change_twenty_times_with_kills_between_and_the_bits_stay(
    serial: tuple[str, list[Any]], tmp_path: Path
) -> None:
    faults = tmp_path / "faults.toml"
    kills = [(9, 0), (22, 1), (33, 0), (47, 1), (70, 0)]
    faults.write_text(
        "".join(f"[[fault]]\nkind = 'kill'\nrank = {r}\nat_step = {s}\nafter_s = 0.002\n" for s, r in kills)
    )
    options = ("-n", "1:5", "--max-restarts", "20", "--faults", str(faults))
    folder = tmp_path / "run"
    assert outcome(folder, train(folder, *options, script=SCRIPT, settings=OVER_MESSAGES)) == serial
    journal = (folder / "journal.jsonl").read_text()
    assert journal.count('"event": "lost"') >= 3
    assert journal.count('"event": "resized"') >= 20
