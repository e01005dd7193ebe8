"""Checkpoints on disk: written beside, checked, and moved into place in one piece."""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from unisono.checkpoint.codec import MARK, flatten, unflatten
from unisono.errors import CheckpointError, UnisonoWarning

FORMAT = 1
MANIFEST = "manifest.json"

_PREFIX = "step-"
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Snapshot:
    """Everything a run needs to go on, and nothing that depends on the number of workers.

    Attributes:
        step: how many steps are committed.
        model: parameters and buffers by name.
        optimizer: the optimizers' state.
        state: position, registered objects, whose state this is.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: Any
    state: Any


class CheckpointStore:
    """The checkpoints of one run, as folders ``step-00000020``.

    Args:
        folder: where they are.
        keep: how many stay; older ones are removed.
        on_event: told what happened, for the journal.
    """

    def __init__(self, folder: Path, *, keep: int = 3, on_event: Callable[..., None] | None = None) -> None:
        self._folder = Path(folder)
        self._keep = keep
        self._tell = on_event or (lambda event, **fields: None)
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._remove_stale()

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, whole or not, oldest first."""
        return _steps(self._folder)

    def save(self, snapshot: Snapshot) -> None:
        """Copy a snapshot now and write it in the background.

        One is written at a time: the next waits for it. If that one failed (a full disk, say), a warning says so
        here; the checkpoints before it stay as they are.

        Raises:
            CheckpointError: the state holds something that cannot be kept; names it.
        """
        self.wait()
        files = _encoded(snapshot)
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="unisono-checkpoint")
        self._pending = self._writer.submit(self._write, snapshot.step, files)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; warn if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.exception()
        if isinstance(error, OSError):
            self._tell("checkpoint failed", error=str(error))
            warnings.warn(
                f"a checkpoint could not be written: {error}. Training goes on, and the checkpoints before it are "
                f"whole; make room, or lower keep=",
                UnisonoWarning,
                stacklevel=3,
            )
        elif error is not None:
            raise error

    def newest(self) -> Snapshot | None:
        """The newest whole checkpoint; None if there is none at all.

        Damaged ones are passed over with a warning that names the file.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged; lists them.
        """
        self.wait()
        return _newest(self._folder, self._tell)

    def close(self) -> None:
        """Finish what is being written."""
        self.wait()
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None

    def _write(self, step: int, files: Mapping[str, bytes]) -> None:
        target = self._folder / f"{_PREFIX}{step:08d}"
        temporary = self._folder / f"{_TEMPORARY}{target.name}-{os.getpid()}"
        try:
            temporary.mkdir(parents=True)
            for name, data in files.items():
                _write_synced(temporary / name, data)
            _sync_folder(temporary)
            _move_into_place(temporary, target)
            _sync_folder(self._folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._tell("checkpoint", step=step, bytes=sum(map(len, files.values())))
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self._folder / f"{_PREFIX}{old:08d}")

    def _remove_stale(self) -> None:
        for left in self._folder.glob(f"{_TEMPORARY}*"):
            if not _is_running(left.name.rpartition("-")[2]):
                shutil.rmtree(left, ignore_errors=True)


def load_snapshot(path: Path) -> Snapshot:
    """Read one checkpoint's folder.

    Raises:
        CheckpointError: a file is missing, cut off or changed; names it.
    """
    files = _verified(path)
    try:
        text = json.loads(files["state.json"])
        tensors = {name: load_tensors(files[f"{name}.safetensors"]) for name in ("model", "optimizer", "state")}
    except (ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    model = {name: tensors["model"][stored] for name, stored in text["model"].items()}
    optimizer = unflatten(text["optimizer"], tensors["optimizer"])
    return Snapshot(text["step"], model, optimizer, unflatten(text["state"], tensors["state"]))


def load_weights(path: Path) -> dict[str, Tensor]:
    """The parameters and buffers in a checkpoint's folder, or in the newest whole one of a run folder.

    Raises:
        CheckpointError: there is none, or none is whole.
    """
    if (path / MANIFEST).exists() or path.name.startswith(_PREFIX):
        return dict(load_snapshot(path).model)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = _newest(folder, lambda event, **fields: None)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint: name a run folder, or a folder checkpoints/step-…")
    return dict(found.model)


def _encoded(snapshot: Snapshot) -> dict[str, bytes]:
    """The files of a checkpoint. Their bytes are copies: later updates do not reach them."""
    optimizer, optimizer_tensors = flatten(snapshot.optimizer)
    state, state_tensors = flatten(snapshot.state)
    aliases, model_tensors = flatten(dict(snapshot.model))
    text = {
        "step": snapshot.step,
        "model": {name: stored[MARK][1] for name, stored in aliases.items()},
        "optimizer": optimizer,
        "state": state,
    }
    files = {
        "model.safetensors": _packed(model_tensors),
        "optimizer.safetensors": _packed(optimizer_tensors),
        "state.safetensors": _packed(state_tensors),
        "state.json": json.dumps(text).encode(),
    }
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    manifest = json.dumps({"format": FORMAT, "step": snapshot.step, "files": listed}, indent=2).encode()
    return {**files, MANIFEST: manifest}


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    # Two names for overlapping parts of one storage are legal here, and safetensors wants each on its own.
    return save_tensors({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def _verified(path: Path) -> dict[str, bytes]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        version, listed = manifest["format"], manifest["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}: it is no whole checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version}, this version of Unisono reads format {FORMAT}")
    return {name: _checked(path / name, expected) for name, expected in listed.items()}


def _checked(path: Path, expected: Mapping[str, Any]) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != expected["bytes"]:
        raise CheckpointError(
            f"{path} has {len(data)} bytes instead of {expected['bytes']}: it was cut off or replaced"
        )
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise CheckpointError(f"{path} has another sha256 than its manifest: its contents changed")
    return data


def _newest(folder: Path, tell: Callable[..., None]) -> Snapshot | None:
    damage: list[str] = []
    for step in reversed(_steps(folder)):
        try:
            found = load_snapshot(folder / f"{_PREFIX}{step:08d}")
        except CheckpointError as error:
            damage.append(str(error))
            tell("checkpoint damaged", step=step, error=str(error))
            continue
        if damage:
            skipped = "; ".join(damage)
            warnings.warn(f"goes on from step {step}, since {skipped}", UnisonoWarning, stacklevel=4)
        return found
    if damage:
        listed = "\n  ".join(damage)
        raise CheckpointError(f"no checkpoint in {folder} is whole:\n  {listed}\nRestore one, or start in a new folder")
    return None


def _steps(folder: Path) -> list[int]:
    names = [path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def _move_into_place(temporary: Path, target: Path) -> None:
    try:
        temporary.replace(target)
    except OSError:
        if not target.exists():
            raise
        # A folder that is not empty cannot be replaced: the old one steps aside first.
        aside = temporary.with_name(f"{_TEMPORARY}old-{target.name}-{os.getpid()}")
        target.replace(aside)
        temporary.replace(target)
        shutil.rmtree(aside)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_running(pid: str) -> bool:
    return pid.isdecimal() and int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()
