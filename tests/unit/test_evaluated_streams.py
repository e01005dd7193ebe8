"""Evaluating on streams: the same to the last digit on any number of workers, whatever happens to them."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from script_cluster import Cluster, Done, Kill

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "evaluated_streams.py"
SHARDS = 6
"""Of the job."""

SIZES = [17, 3, 40, 22, 9, 31, 0, 28, 1]
IDS = [100 * file + number for file, size in enumerate(SIZES) for number in range(size)]
STREAMS = ("split", "whole", "tail", "one", "loader")


def train(at: Path, stream: str, workers: int | tuple[int, int], **how: Any) -> Done:
    return Cluster(at)(SCRIPT, workers, shards=SHARDS, STREAM=stream, **how)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    return {one: train(tmp_path_factory.mktemp(one), one, 1) for one in STREAMS}


def told(done: Done, what: str) -> list[Any]:
    (line,) = (line for line in done.said if line.startswith(f"after {what} "))
    return [ast.literal_eval(one) for one in re.findall(r"\[.*?\]", line)]


@pytest.mark.parametrize("stream", STREAMS)
def test_alone_each_sample_is_evaluated_once(stream: str, serial: dict[str, Done]) -> None:
    ids = [7] if stream == "one" else IDS
    done = serial[stream]
    means = [float(mean) for line in done.said for mean in re.findall(r"'ids', ([\d.]+)", line)]
    assert means == [pytest.approx(sum(ids) / len(ids))] * 3
    assert sorted(told(done, "predict")[0]) == ids
    blocks, read = told(done, "values")
    assert read == ids
    assert len(set(blocks)) == len(blocks)
    assert told(done, "sums")[0][-2:] == [len(blocks), len(ids)]


def test_a_stream_that_nobody_splits_is_predicted_in_its_own_order(serial: dict[str, Done]) -> None:
    assert told(serial["whole"], "predict")[0] == IDS


@pytest.mark.parametrize("stream", STREAMS)
def test_figures_are_the_same_on_three_workers(stream: str, serial: dict[str, Done], tmp_path: Path) -> None:
    done = train(tmp_path, stream, 3)
    assert (done.outcome, done.said) == (serial[stream].outcome, serial[stream].said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stream", ["whole", *(pytest.param(name, marks=pytest.mark.slow) for name in STREAMS if name != "whole")]
)
def test_figures_are_the_same_while_workers_come_and_die_in_evaluations(
    stream: str, serial: dict[str, Done], tmp_path: Path
) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    train(undisturbed, stream, 3, LEDGER=str(undisturbed))
    kills = [Kill(1, 0, 9), Kill(3, 1, 8), Kill(5, 2, 9)]
    done = train(disturbed, stream, (3, 3), kills=kills, LEDGER=str(disturbed))
    assert (done.outcome, done.said) == (serial[stream].outcome, serial[stream].said)
    assert done.world.struck == len(kills)
    read = [len((folder / "read").read_text().splitlines()) for folder in (undisturbed, disturbed)]
    assert read[1] > read[0]  # some evaluations were made again
