"""What each worker writes while ``unisono verify`` watches: digests of all that could differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor

from unisono.train.digest import tensor_digest

if TYPE_CHECKING:
    from unisono.train.control import StepReport
    from unisono.train.engine import Call


class Trace:
    """Appends to ``rank-N.jsonl``: a line per step with every tensor's digest, a line per call of ``step.run``."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @classmethod
    def open(cls, folder: Path | None, rank: int) -> Trace | None:
        """A trace in ``folder``; none if nobody watches."""
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return cls((folder / f"rank-{rank}.jsonl").open("w", encoding="utf-8"))

    def step(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """The weights after ``number`` steps."""
        digests = {name: tensor_digest(tensor)[:16] for name, tensor in tensors.items()}
        self._write({"kind": "weights", "step": number, "tensors": digests})

    def call(self, call: Call, shards: range, report: StepReport) -> None:
        """What went into a call, and the loss of each shard, before the update."""
        inputs = {shard: _batch_digest(batch) for shard, batch in zip(shards, call.shards, strict=True)}
        losses = [part.loss.hex() for part in report.shards]
        samples = [len(call.batch.shard(shard)) for shard in range(len(losses))]
        self._write(
            {
                "kind": "call",
                "step": call.step,
                "call": call.number,
                "inputs": inputs,
                "losses": losses,
                "samples": samples,
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _batch_digest(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return tensor_digest(batch)[:16]
    if isinstance(batch, dict):
        return " ".join(f"{key}={_batch_digest(value)}" for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return " ".join(map(_batch_digest, batch))
    return repr(batch)
