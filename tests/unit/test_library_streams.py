"""Hugging Face's datasets and WebDataset: never a sample lost or repeated, whatever happens to the workers."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from script_cluster import Cluster, Done, Kill

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital'"),  # which torchdata calls
]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "library_streams.py"
SHARDS = 6
"""Of the job."""

SIZES = [17, 3, 40, 22, 9, 31, 5, 28]
IDS = [100 * file + number for file, size in enumerate(SIZES) for number in range(size)]
STREAMS = ("hugging-face", "hugging-face-map", "webdataset", "arrow", "stateful-loader")


@pytest.fixture(autouse=True)
def _collected_soon() -> Iterator[None]:
    yield
    collect()


def collect() -> None:
    """WebDataset leaves it to the collector to close what it has opened."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for file, size in enumerate(SIZES):
        numbers = range(100 * file, 100 * file + size)
        rows = [{"number": number, "inputs": [number / 100, 1.0, file / 10, -1.0]} for number in numbers]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{file}.parquet", row_group_size=10)
        with webdataset.TarWriter(str(folder / f"{file}.tar")) as writer:
            for row in rows:
                writer.write({"__key__": f"{row['number']}", "number.cls": row["number"], "inputs.json": row["inputs"]})
    return folder


def train(stream: str, files: Path, at: Path, workers: int | tuple[int, int], **how: Any) -> Done:
    return Cluster(at)(SCRIPT, workers, shards=SHARDS, STREAM=stream, FILES=str(files), **how)


@pytest.fixture(scope="module")
def serial(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    return {one: train(one, files, tmp_path_factory.mktemp(one), 1) for one in STREAMS}


@pytest.mark.parametrize("stream", STREAMS)
def test_alone_every_epoch_has_every_sample_once(stream: str, serial: dict[str, Done]) -> None:
    epochs = [line for line in serial[stream].said if line.startswith("epoch")]
    assert len(epochs) == 2
    for line in epochs:
        assert f"{len(IDS)} samples, {len(IDS)} different ones, [1] times" in line


@pytest.mark.parametrize(
    "stream", ["webdataset", *(pytest.param(name, marks=pytest.mark.slow) for name in STREAMS if name != "webdataset")]
)
def test_samples_and_weights_are_the_same_while_workers_come_and_die(
    stream: str, files: Path, serial: dict[str, Done], tmp_path: Path
) -> None:
    kills = [Kill(1, 0), Kill(4, 1, 3), Kill(6, 2, 2)]
    done = train(stream, files, tmp_path, (3, 3), kills=kills)
    assert (done.outcome, done.said) == (serial[stream].outcome, serial[stream].said)
    assert done.world.struck == len(kills)


@pytest.mark.parametrize(
    "stream", ["webdataset", *(pytest.param(name, marks=pytest.mark.slow) for name in STREAMS if name != "webdataset")]
)
def test_a_run_on_three_workers_goes_on_with_two(
    stream: str, files: Path, serial: dict[str, Done], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(stream, files, tmp_path, 3, folder=folder, UNISONO_CHECKPOINT_EVERY="1", UNISONO_STOP_AFTER="5")
    again = train(stream, files, tmp_path, 2, folder=folder)
    assert again.outcome == serial[stream].outcome
    assert {line for line in again.said if line.startswith("epoch")} <= set(serial[stream].said)
    assert [line["step"] for line in again.journal("resumed")] == [5]
