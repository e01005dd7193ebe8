"""Parquet and Arrow files as groups of rows, each of which is read at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch

from unisono.errors import DataError, JobError

try:
    import pyarrow
    import pyarrow.parquet
except ImportError as error:
    raise JobError(
        "unisono.ArrowStream needs pyarrow 20 or newer, which is not installed: pip install 'pyarrow>=20' (in a clone "
        "of Unisono: pip install -c constraints.txt '.[arrow]')"
    ) from error

MAGIC = {b"PAR1": "parquet", b"ARRO": "arrow"}
"""What files begin with."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Neighbouring rows of a file.

    Attributes:
        path: the path of the file.
        kind: what kind of file it is.
        number: the number of the row group of a Parquet file, or of the record batch of an Arrow file.
        rows: the number of rows.
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
