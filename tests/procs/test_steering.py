"""Policies change everything that can be changed, over and over, on real workers over sockets.

Any number of workers, kills at all kinds of places, and runs that go on: ``tests/unit/test_scripts_of_clusters.py`` and
``test_finer_batches.py``.
"""

from pathlib import Path

import pytest

from outcomes import outcome, outcome_in, train
from serial_runs import SerialRuns
from training import whole_lines

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("warm")]

SCRIPTS = Path(__file__).parent / "scripts"


def test_topology_and_batch_change_twenty_times_and_the_bits_stay(serial_runs: SerialRuns, tmp_path: Path) -> None:
    script, folder, workers = SCRIPTS / "steered.py", tmp_path / "run", 3
    ended = train(folder, "-n", f"{workers}", script=script, settings={"UNISONO_TRANSPORT": "sockets"})
    digest, decided = outcome_in(serial_runs(script).run_dir)
    assert outcome(folder, ended) == (digest, decided)
    assert len([verb for _, _, verb, _, _ in decided if verb == "set_topology"]) >= 20
    lines = whole_lines(folder / "metrics.jsonl")
    measured = [line["links"] for line in lines if "links" in line]
    assert len(measured) > 5
    assert all(len(links["latency_s"]) == workers for links in measured)
    assert all(len(line["workers"]) == workers for line in lines)
    assert all(each["sent_bytes"] > 0 for line in lines[1:] for each in line["workers"])


def test_batches_are_cut_finer_and_coarser_beside_the_backward_pass_and_the_bits_stay(
    serial_runs: SerialRuns, tmp_path: Path
) -> None:
    script, folder = SCRIPTS / "finer.py", tmp_path / "run"
    told = {"OPTIONS": '{"communication": {"transport": "sockets", "topology": "ring", "overlap": true}}'}
    ended = train(folder, "-n", "2", script=script, settings=told)
    assert outcome(folder, ended) == outcome_in(serial_runs(script).run_dir)
