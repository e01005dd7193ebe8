"""A stream over Parquet and Arrow files, whose readers say exactly where they stand, also where they shuffle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch

from unisono.errors import DataError, JobError
from unisono.plan.order import Permutation, Stream, signed, stream_seed

try:
    import pyarrow
    import pyarrow.parquet
except ImportError as error:
    raise JobError(
        "unisono.ArrowStream needs pyarrow 20 or newer, which is not installed: pip install 'pyarrow>=20' (in a clone "
        "of Unisono: pip install -c constraints.txt '.[arrow]')"
    ) from error

MAGIC = {b"PAR1": "parquet", b"ARRO": "arrow"}
"""The kinds of files, by the bytes with which they begin."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Neighbouring rows of a file.

    ``number`` is that of the row group of a Parquet file, or of the record batch of an Arrow file.
    """

    path: str
    kind: str
    number: int
    rows: int

    def read(self, columns: Sequence[str] | None) -> dict[str, Any]:
        """The columns by name: tensors of numbers, or of lists of numbers of one length; else lists of values."""
        if self.kind == "parquet":
            with pyarrow.parquet.ParquetFile(self.path) as file:
                table = file.read_row_group(self.number, columns=columns, use_threads=False)
        else:
            with pyarrow.OSFile(self.path) as source:
                table = pyarrow.table(pyarrow.ipc.open_file(source).get_batch(self.number))
            table = table if columns is None else table.select(columns)
        return {name: _values(table.column(name).combine_chunks()) for name in table.column_names}


def groups_of(path: str | PathLike[str]) -> list[RowGroup]:
    """The groups of a file that have rows, in its order.

    Raises:
        DataError: there is no such file, or it is of another kind.
    """
    name = fspath(path)
    try:
        with pyarrow.OSFile(name) as source:
            kind = MAGIC.get(bytes(source.read(4)))
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(name) as file:
                metadata = file.metadata
                rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        elif kind == "arrow":
            with pyarrow.OSFile(name) as source:
                batches = pyarrow.ipc.open_file(source)
                rows = [batches.get_batch(number).num_rows for number in range(batches.num_record_batches)]
        else:
            raise DataError(f"{name} is neither a Parquet file nor an Arrow file (of the IPC file format)")
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{name} cannot be read as a Parquet or an Arrow file: {error}") from error
    return [RowGroup(name, kind, number, count) for number, count in enumerate(rows) if count]


def _values(column: Any) -> Any:
    if column.null_count:
        return column.to_pylist()
    if pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type):
        return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    if pyarrow.types.is_list(column.type) or pyarrow.types.is_fixed_size_list(column.type):
        lengths, inner = set(column.value_lengths().to_pylist()), _values(column.flatten())
        if len(lengths) == 1 and isinstance(inner, torch.Tensor):
            return inner.view(len(column), *lengths, *inner.shape[1:])
    return column.to_pylist()


class ArrowStream:
    """A stream over the rows of Parquet and Arrow files, for ``run.steps``.

    Row groups (record batches of Arrow files) are distributed among the readers, one after the other. With ``shuffle``
    they come in a keyed order, another one in each epoch, and each reader mixes the rows of ``window`` of its groups.
    A sample is a dict of a row's values: tensors where they are numbers, or lists of numbers of one length.

    Args:
        paths: the files, in an order that is the same on all workers.
        columns: the names of the columns to read; all by default.
        shuffle: whether to shuffle.
        window: the number of row groups that a reader has in memory, and mixes the rows of.
        transform: a function that makes a sample of such a dict. What it draws from the global generators is keyed.

    Raises:
        DataError: there are no files, or one cannot be read, or ``window`` is below 1.
        JobError: pyarrow is not installed.
    """

    def __init__(
        self,
        paths: Sequence[str | PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        shuffle: bool = True,
        window: int = 4,
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        if isinstance(paths, str | PathLike) or not paths:
            raise DataError("ArrowStream needs a list of files, and has none: sorted(folder.glob('*.parquet')), say")
        if window < 1:
            raise DataError(f"ArrowStream(window={window}): needs a number of row groups from 1 on")
        self._groups = [group for path in paths for group in groups_of(path)]
        self._columns, self._window = None if columns is None else list(columns), window
        self._shuffles, self._transform = shuffle, transform

    def __len__(self) -> int:
        """The number of rows of all files."""
        return sum(group.rows for group in self._groups)

    def open_reader(self, number: int, readers: int) -> ArrowReader:
        """A reader; the order follows from torch's generator, which all readers of an epoch find alike."""
        key, order = None, np.arange(len(self._groups))
        if self._shuffles:
            key = int(torch.randint(2**62, ()))
            order = Permutation(len(order), key)(order)
        mine = [self._groups[place] for place in order[number::readers].tolist()]
        windows = [tuple(mine[start : start + self._window]) for start in range(0, len(mine), self._window)]
        return ArrowReader([Window(rows, _apart(key, number, place)) for place, rows in enumerate(windows)], self)

    def sample(self, row: dict[str, Any]) -> Any:
        """A sample of a row."""
        return row if self._transform is None else self._transform(row)

    def read(self, group: RowGroup) -> dict[str, Any]:
        """The columns of a group."""
        return group.read(self._columns)


@dataclass(frozen=True, slots=True)
class Window:
    """Row groups whose rows are mixed. ``key`` is that of the order of their rows; None for that of the files."""

    groups: tuple[RowGroup, ...]
    key: int | None

    @property
    def rows(self) -> int:
        """The number of rows of all its groups."""
        return sum(group.rows for group in self.groups)

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield for each row, in order, the number of its group, and its number within the group."""
        places = np.arange(self.rows)
        order = places if self.key is None else Permutation(self.rows, self.key)(places)
        stops = np.cumsum([group.rows for group in self.groups])
        groups = np.searchsorted(stops, order, side="right")
        begins = stops - [group.rows for group in self.groups]
        return zip(groups.tolist(), (order - begins[groups]).tolist(), strict=True)


class ArrowReader:
    """Gives the rows of windows, one after the other."""

    def __init__(self, windows: Sequence[Window], stream: ArrowStream) -> None:
        self._windows, self._stream = windows, stream
        self._window = self._row = 0
        self._rows: Iterator[tuple[int, int]] | None = None
        self._columns: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._window < len(self._windows):
            if self._rows is None:
                window = self._windows[self._window]
                self._columns = [self._stream.read(group) for group in window.groups]
                self._rows = islice(window.places(), self._row, None)
            if (place := next(self._rows, None)) is not None:
                self._row += 1
                group, row = place
                return self._stream.sample({name: column[row] for name, column in self._columns[group].items()})
            self._window, self._row, self._rows = self._window + 1, 0, None
        self._columns = []
        raise StopIteration

    def state_dict(self) -> dict[str, int]:
        """The window, and how many of its rows were given."""
        return {"window": self._window, "row": self._row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from such a state.

        Raises:
            DataError: the files have no such place.
        """
        self._window, self._row, self._rows = state["window"], state["row"], None
        if not 0 <= self._window < len(self._windows) or not 0 <= self._row <= self._windows[self._window].rows:
            raise DataError(f"the files have no row {self._row} of window {self._window}: they are others than before")


def _apart(key: int | None, *place: int) -> int | None:
    """A key of its own for each place."""
    return None if key is None else signed(stream_seed(key, Stream.WINDOW, *place))
