"""The shuffle by blocks beside the full one, on a data set of compressed blocks."""

import statistics
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from unisono.data.sample_order import KeyedOrder
from unisono.data.shards import ShardSource
from unisono.plan.batches import Batches, Position
from unisono.plan.order import BlockShuffle
from unisono.plan.split import Split

BATCH, SHARDS, FEATURES = 256, 8, 256


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        samples: the number of samples, of a kilobyte each.
        block_size: the number of samples in a compressed block.
        windows: the numbers of blocks whose samples are mixed.
        most_read: the number of blocks that are read at most for a figure.
        rounds: the number of times that each is measured, in turns.
    """

    samples: int = 100_000
    block_size: int = 1000
    windows: Sequence[int] = (4, 16)
    most_read: int = 300
    rounds: int = 5


class CompressedBlocks:
    """A data set of blocks in a file, which keeps those that it has read last.

    Args:
        path: the file.
        places: where each block begins, and the last one ends.
        samples: the number of samples.
        block_size: the number of samples in a block.
        keeps: the number of blocks to keep.
    """

    def __init__(self, path: Path, places: Sequence[int], samples: int, block_size: int, keeps: int) -> None:
        self._path, self._places, self._samples, self.block_size = path, places, samples, block_size
        self._keeps, self._kept = keeps, dict[int, Any]()
        self.read = 0

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        block, row = divmod(index, self.block_size)
        if block not in self._kept:
            if len(self._kept) == self._keeps:
                del self._kept[next(iter(self._kept))]
            self._kept[block] = self._of(block)
        return self._kept[block][row]

    def _of(self, block: int) -> Any:
        self.read += 1
        with self._path.open("rb") as file:
            file.seek(self._places[block])
            data = zlib.decompress(file.read(self._places[block + 1] - self._places[block]))
        return np.frombuffer(bytearray(data), dtype=np.float32).reshape(-1, FEATURES)


def run(choice: Choice) -> Report:
    """Load the first batches of an epoch in each order, on one worker and as the first of four does."""
    meter = NoiseMeter()
    meter.calibrate()
    orders: dict[str, KeyedOrder] = {"full shuffle": KeyedOrder(choice.samples, 0, True)}
    for window in choice.windows:
        how = BlockShuffle(choice.block_size, window)
        orders[f"blocks, {window} at a time"] = KeyedOrder(choice.samples, 0, True, False, how)
    orders["no shuffle"] = KeyedOrder(choice.samples, 0)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        path = Path(name) / "blocks"
        places = write(path, choice)
        for _ in range(choice.rounds):
            for order in orders:
                for workers in (1, 4):
                    data = CompressedBlocks(path, places, choice.samples, choice.block_size, max(choice.windows))
                    found.setdefault((order, workers), []).append(load(data, orders[order], workers, choice.most_read))
    rows = []
    for order, keyed in orders.items():
        cells = []
        for workers in (1, 4):
            cells += [f"{statistics.median(one):,.3g}" for one in zip(*found[order, workers], strict=True)]
        rows.append((order, *cells, f"{distance(keyed):.1%}"))
    grid = Grid(
        f"{choice.samples} samples of 1 kB in compressed blocks of {choice.block_size}, of which {max(choice.windows)} "
        f"are kept; batch {BATCH}, {SHARDS} shards",
        (
            "",
            "one worker: samples/s",
            "blocks per 1000 samples",
            "each of four: samples/s",
            "blocks per 1000",
            "distance",
        ),
        rows,
        (
            "samples/s: of a worker's own shards, loaded in its process. blocks: decompressed for 1000 of its samples.",
            "distance: between the places of neighbours of the data set in an epoch, in the median, of the epoch's "
            "length. A full shuffle has 29 %.",
        ),
    )
    return Report("shuffles", asdict(choice), meter.read(), [grid], {f"{k[0]}, {k[1]}": v for k, v in found.items()})


def write(path: Path, choice: Choice) -> list[int]:
    """Compress the blocks; returns where each begins."""
    places, draw = [0], np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, choice.samples, choice.block_size):
            rows = min(choice.block_size, choice.samples - start)
            values = draw.integers(0, 64, (rows, FEATURES)).astype(np.float32)
            file.write(zlib.compress(values.tobytes(), 1))
            places.append(file.tell())
    return places


def load(data: CompressedBlocks, order: KeyedOrder, workers: int, most_read: int) -> tuple[float, float]:
    """Samples in a second, and blocks that were read for 1000 of them."""
    source, mine = ShardSource(data, order), Split.even(SHARDS, workers).of(0)
    loaded, started = 0, perf_counter()
    for _, batch in Batches(order.cut, BATCH, SHARDS).remaining(Position(), 1):
        source.of(batch, mine)
        loaded += sum(len(batch.shard(shard)) for shard in mine)
        if data.read >= most_read:
            break
    return loaded / (perf_counter() - started), 1000 * data.read / loaded


def distance(order: KeyedOrder) -> float:
    """How far neighbours of the data set are from each other in an epoch, in the median, as a share of its length."""
    samples = order.samples_at(0, range(order.samples))
    places = np.empty_like(samples)
    places[samples] = np.arange(order.samples)
    return float(np.median(np.abs(np.diff(places)))) / order.samples
