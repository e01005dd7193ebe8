"""Parquet and Arrow files as a stream: every row once, in an order that survives a resume in its middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import unisono
from unisono.data.stream_reader import Reader, ReaderKey, ReaderState
from unisono.errors import DataError

pytestmark = pytest.mark.unit

SIZES = [13, 0, 25, 4, 30]
ROWS = [100 * file + row for file, size in enumerate(SIZES) for row in range(size)]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Parquet files with row groups of 5, and one Arrow file with batches of 8."""
    found = []
    for file, size in enumerate(SIZES):
        numbers = [100 * file + row for row in range(size)]
        table = pa.table(
            {
                "number": pa.array(numbers, pa.int64()),
                "pair": pa.array([[number / 2, 1.0] for number in numbers], pa.list_(pa.float32())),
                "grid": pa.array([[[number], [0]] for number in numbers], pa.list_(pa.list_(pa.int16()))),
                "text": pa.array([f"text {number}" for number in numbers]),
                "some": pa.array([[0] * (number % 3) for number in numbers], pa.list_(pa.int64())),
                "gap": pa.array([None if number % 2 else number for number in numbers], pa.int64()),
            }
        )
        path = tmp_path / f"{file}.{'arrow' if file == 4 else 'parquet'}"
        if file == 4:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=8)
        else:
            pq.write_table(table, path, row_group_size=5)
        found.append(path)
    return found


def reader(stream: Any, number: int, at: ReaderState | None = None, epoch: int = 0) -> Reader:
    return Reader(stream, ReaderKey(5, 0, 0, epoch, number, 3), at or ReaderState())


def numbers(samples: list[Any]) -> list[int]:
    return [int(one["number"]) for one in samples]


@pytest.mark.parametrize("shuffle", [False, True])
def test_readers_have_every_row_once(files: list[Path], shuffle: bool) -> None:
    stream = unisono.ArrowStream(files, shuffle=shuffle)
    found = [numbers(reader(stream, number).take(100)) for number in range(3)]
    assert len(stream) == len(ROWS)
    assert sorted(row for rows in found for row in rows) == ROWS
    assert (found[0][:5] == ROWS[:5]) is not shuffle


def test_epochs_and_readers_are_shuffled_apart_and_windows_mix_row_groups(files: list[Path]) -> None:
    stream = unisono.ArrowStream(files, window=3)
    first, second = (numbers(reader(stream, 0, epoch=epoch).take(100)) for epoch in (0, 1))
    assert first != second
    groups = [number // 5 for number in first[:10]]
    assert len(set(groups)) > 2


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("before", [1, 4, 5, 6, 11, 23])
def test_a_reader_goes_on_from_a_state_without_reading_what_was_given(
    files: list[Path], shuffle: bool, before: int
) -> None:
    stream = unisono.ArrowStream(files, shuffle=shuffle, window=2)
    whole, cut = numbers(reader(stream, 1).take(100)), reader(stream, 1)
    assert numbers(cut.take(before)) == whole[:before]
    assert set(cut.at.state) == {"window", "row"}
    torch.rand(4)
    assert numbers(reader(stream, 1, cut.at).take(100)) == whole[before:]


def test_a_row_is_a_dict_of_tensors_and_values_of_the_columns_that_are_asked_for(files: list[Path]) -> None:
    row = reader(unisono.ArrowStream(files, shuffle=False), 0).take(2)[1]
    assert row["number"].dtype == torch.int64
    assert row["pair"].tolist() == [0.5, 1.0]
    assert row["grid"].tolist() == [[1], [0]]
    assert (row["text"], row["some"], row["gap"]) == ("text 1", [0], None)
    (row,) = reader(unisono.ArrowStream(files, columns=["text"], transform=str), 0).take(1)
    assert row.startswith("{'text': 'text ")


def test_what_cannot_be_read_is_refused_in_clear_words(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("number\n1\n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a.csv is neither a Parquet file nor an Arrow file"):
        unisono.ArrowStream([tmp_path / "a.csv"])
    for name in ("b.parquet", "c.parquet"):
        with pytest.raises(DataError, match=f"{name} cannot be read as a Parquet or an Arrow file"):
            unisono.ArrowStream([tmp_path / name])
    with pytest.raises(DataError, match="needs a list of files, and has none"):
        unisono.ArrowStream([])
    with pytest.raises(DataError, match=r"window=0\): needs a number of row groups from 1 on"):
        unisono.ArrowStream([tmp_path / "a.csv"], window=0)


def test_a_state_of_other_files_is_refused(files: list[Path]) -> None:
    with pytest.raises(DataError, match="the files have no row 50 of window 0: they are others than before"):
        reader(unisono.ArrowStream(files), 0, ReaderState(50, {"window": 0, "row": 50}))
