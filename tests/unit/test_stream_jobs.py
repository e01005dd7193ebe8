"""Training on streams: the same bits on any number of workers, whatever happens to them; no sample lost or repeated."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from script_cluster import Cluster, Done, Kill

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "streams.py"
SHARDS = 6
"""Of the job."""

STREAMS = ("split", "whole", "own", "loader")
IDS = [100 * file + number for file, size in enumerate([17, 3, 40, 22, 9, 31, 0, 28]) for number in range(size)]


def train(cluster: Cluster, stream: str, workers: int | tuple[int, int], **how: Any) -> Done:
    return cluster(SCRIPT, workers, shards=SHARDS, STREAM=stream, **how)


def found(done: Done) -> tuple[Any, ...]:
    return done.outcome, done.said


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    found: dict[str, Done] = {}
    for one in STREAMS:
        folder = tmp_path_factory.mktemp(one)
        found[one] = train(Cluster(folder), one, 1, LEDGER=str(folder))
    return found


def ledger(folder: Path) -> dict[int, list[int]]:
    """The ids of each step, in order."""
    found: dict[int, list[int]] = defaultdict(list)
    for path in folder.glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            found[line["step"]] += line["ids"]
    return {step: sorted(ids) for step, ids in sorted(found.items())}


@pytest.mark.parametrize("stream", STREAMS)
def test_alone_every_epoch_has_every_sample_once(stream: str, serial: dict[str, Done]) -> None:
    lines = serial[stream].metrics.values()
    used = ledger(serial[stream].folder.parent)
    epochs: list[list[int]] = [[]]
    for line in lines:
        assert line["batch_size"] == len(used[line["step"]])
        epochs[-1] += used[line["step"]]
        epochs += [[]] if line.get("ends_epoch") else []
    assert [sorted(ids) for ids in epochs] == [*([sorted(IDS)] * 6), []]
    assert max(line["batch_size"] for line in lines) <= 48


@pytest.mark.parametrize("stream", STREAMS)
def test_weights_metrics_and_samples_are_the_same_on_three_workers(
    stream: str, serial: dict[str, Done], tmp_path: Path
) -> None:
    done = train(Cluster(tmp_path), stream, 3, LEDGER=str(tmp_path))
    assert found(done) == found(serial[stream])
    assert ledger(tmp_path) == ledger(serial[stream].folder.parent)


@pytest.mark.parametrize("stream", STREAMS)
def test_weights_and_metrics_are_the_same_while_workers_come_and_die(
    stream: str, serial: dict[str, Done], tmp_path: Path
) -> None:
    kills = [Kill(2, 0), Kill(5, 1, 3), Kill(8, 0, 5), Kill(11, 2, 2)]
    done = train(Cluster(tmp_path), stream, (3, 3), kills=kills)
    assert found(done) == found(serial[stream])
    assert done.world.struck == len(kills)


@pytest.mark.parametrize(
    "stream", ["whole", *(pytest.param(name, marks=pytest.mark.slow) for name in STREAMS if name != "whole")]
)
def test_a_run_on_three_workers_goes_on_with_two(stream: str, serial: dict[str, Done], tmp_path: Path) -> None:
    cluster, folder = Cluster(tmp_path), tmp_path / "run"
    train(cluster, stream, 3, folder=folder, UNISONO_CHECKPOINT_EVERY="1", UNISONO_STOP_AFTER="9")
    again = train(cluster, stream, 2, folder=folder)
    assert again.outcome == serial[stream].outcome
    assert [line["step"] for line in again.journal("resumed")] == [9]


@pytest.mark.parametrize("stream", ["whole", "own"])
def test_a_loop_that_is_entered_before_its_first_step_begins_where_the_others_are(
    stream: str, serial: dict[str, Done], tmp_path: Path
) -> None:
    kills = [Kill(3, 0), Kill(7, 1, 4)]
    assert found(train(Cluster(tmp_path), stream, (3, 3), kills=kills, ENTERS="1")) == found(serial[stream])
    cluster, folder = Cluster(tmp_path / "more"), tmp_path / "more" / "run"
    train(cluster, stream, 3, folder=folder, UNISONO_CHECKPOINT_EVERY="1", UNISONO_STOP_AFTER="4", ENTERS="1")
    assert train(cluster, stream, 2, folder=folder, ENTERS="1").outcome == serial[stream].outcome


def test_audits_read_shards_of_others(serial: dict[str, Done], tmp_path: Path) -> None:
    assert train(Cluster(tmp_path), "split", 3, UNISONO_AUDIT="0.5").outcome == serial["split"].outcome


@pytest.mark.slow
def test_loader_processes_change_nothing_while_workers_come_and_die_and_in_a_run_that_goes_on_with_two(
    serial: dict[str, Done], tmp_path: Path
) -> None:
    alike, kills = serial["own"], [Kill(2, 0), Kill(5, 1, 3), Kill(11, 2, 2)]
    done = train(Cluster(tmp_path), "own-ahead", (3, 3), kills=kills)
    assert found(done) == found(alike)
    assert done.world.struck == len(kills)
    cluster, folder = Cluster(tmp_path / "more"), tmp_path / "more" / "run"
    train(cluster, "own-ahead", 3, folder=folder, UNISONO_CHECKPOINT_EVERY="1", UNISONO_STOP_AFTER="2")
    again = train(cluster, "own-ahead", 2, folder=folder, LEDGER=str(tmp_path))
    assert again.outcome == alike.outcome
    rest = {step: ids for step, ids in ledger(alike.folder.parent).items() if step >= 2}
    assert ledger(tmp_path) == rest
