"""Run folders that a test makes up, for what reads them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.job import Job


def line(step: int, total: float = 1.0, size: int = 10, per_epoch: int = 4, **more: Any) -> dict[str, Any]:
    """A step of a run with four steps in an epoch."""
    seconds = {"data": 0.1, "compute": 0.5, "exposed_communication": 0.2, "update": 0.1, "total": total}
    found: dict[str, Any] = {
        "step": step,
        "epoch": step // per_epoch,
        "position": size * step,
        "batch_size": size,
        "loss": 9.0 - step,
    }
    found |= {"lr": 0.1, "world_size": 1, "seconds": seconds, **more}
    return found | ({"ends_epoch": True} if step % per_epoch == per_epoch - 1 else {})


def write(folder: Path, lines: Sequence[Mapping[str, Any]], **result: Any) -> Path:
    """What a run of these steps has left; returns its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps(asdict(Job.create(batch_size=10, shards=4))))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (folder / "result.json").write_text(json.dumps({"weights_sha256": "ab", "epoch_samples": 40, **result}))
    return folder
