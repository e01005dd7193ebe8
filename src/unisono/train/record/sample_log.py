"""The log of the samples that each worker used in each step: kept when somebody is going to check it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.data.order import Order
from unisono.jsonl import open_lines
from unisono.plan.batches import Batches
from unisono.train.step.listeners import Counted, Listener
from unisono.train.step.step import Call

FOLDER = "samples"
"""In the run folder: one file per worker."""


class SampleLog(Listener):
    """Appends lines to ``samples/<worker>.jsonl``.

    ``computed`` before the reduction of a call of ``step.run``, ``committed`` after it. Each is written at once: a
    worker that is killed takes none with it.

    Args:
        run_dir: the run folder.
        worker: this worker's id; ``rank-N`` where workers stay the same.
    """

    def __init__(self, run_dir: Path, worker: str) -> None:
        path = run_dir / FOLDER / f"{worker}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_lines(path)
        self._loop: tuple[int, Batches, Order] | None = None
        self._generation, self._computed = 0, set[tuple[int, int]]()

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """A loop over a data set begins."""
        self._loop = number, batches, order

    def call_begins(self, call: Call, shards: Sequence[int], generation: int) -> None:
        """This worker is about to compute these shards of a step."""
        assert self._loop is not None, "a loop has begun"
        loop, batches, order = self._loop
        if generation != self._generation:
            self._generation, self._computed = generation, set()
        batch, place = call.batch, (call.step, call.number)
        if place in self._computed:  # again, since weights were mended; the others do it again as well
            return
        self._computed.add(place)
        cut = batches.of(batch.epoch)
        used = {shard: order.counted_at(batch.epoch, batch.shard(shard)).tolist() for shard in shards}
        line = {"computed": call.step, "call": call.number, "generation": generation, "loop": loop}
        about = {"samples": cut.samples, "per_epoch": cut.used, "epoch": batch.epoch, "cut": batch.shards}
        self._write({**line, **about, "shards": used})

    def call_counted(self, call: Call, counted: Counted) -> None:
        """The step's update is done here."""
        self._write({"committed": call.step, "call": call.number, "generation": counted.generation})

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
