"""Checkpoints that say what no run would write, with digests that are right."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from unisono.checkpoint.snapshot import FORMAT, MANIFEST, PARTS, STATE, FrozenSnapshot, Snapshot
from unisono.checkpoint.tensor_bytes import copies, pieces

Changes = Mapping[str, bytes]
"""What stands in a file instead, by the file's name."""


def forge(folder: Path, changes: Changes) -> Path:
    """A checkpoint whose files say this, and whose digests agree."""
    folder.mkdir(parents=True)
    FrozenSnapshot.of(Snapshot(1, {}, [], {})).write(folder)
    for name, data in changes.items():
        (folder / name).write_bytes(data)
    if MANIFEST not in changes:
        usual = (STATE, *(f"{part}.safetensors" for part in PARTS))
        files = {name: _entry(folder / name) for name in {*usual, *changes}}
        manifest: dict[str, Any] = {"format": FORMAT, "step": 1, "files": files}
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def safetensors_of(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of these."""
    return b"".join(pieces(copies(tensors)))


def state_json(model: Any, optimizer: Any = None, state: Any = None) -> bytes:
    """What ``state.json`` says of these skeletons."""
    return json.dumps({"step": 1, "model": model, "optimizer": optimizer, "state": state}).encode()


def _entry(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
