"""A checkpoint: a run's state at a step, in a folder of its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from unisono.checkpoint.codec import flat_digest, flatten, tree_digest, unflatten
from unisono.checkpoint.tensor_bytes import (
    WHOLE,
    Share,
    copies,
    mapped_tensors,
    pieces,
    read_tensors,
    require_each_once,
    require_kept,
)
from unisono.device import Handover
from unisono.errors import CheckpointError, Unreadable
from unisono.failpoints import failpoint
from unisono.received import open_file, read_object, short, value_of
from unisono.words import is_finite

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
NOBODY: Mapping[str, int] = {}
PARTS = ("model", "optimizer", "state")
DIGESTED = ("model", "optimizer")
"""The parts that an update changes."""

NAMED = 8
"""The most tensors that are not finite whose names a manifest gives."""

_Written = tuple[dict[str, dict[str, Any]], dict[str, list[str]], list[str]]
"""A process's report about its share: the manifest's entries for its files, the names of its tensors by part, and the
names of those that are not finite."""

_FILE = re.compile(rf"({'|'.join(PARTS)})(-[1-9][0-9]{{0,5}})?\.safetensors")

Digests = dict[str, int]
"""Quick digests, of 64 bits each, by part."""


@dataclass(frozen=True)
class Snapshot:
    """The state that a run needs to go on, of which nothing depends on the number of workers.

    Attributes:
        step: the number of committed steps.
        model: the modules' ``state_dict``: parameters and buffers by name.
        optimizer: the optimizers' state.
        state: the position, the state of registered objects, and the names of trained parameters.
    """

    step: int
    model: dict[str, Any]
    optimizer: Any
    state: Any

    def digests(self) -> Digests:
        """Quick digests of the parts that an update changes.

        Raises:
            CheckpointError: it holds something that cannot be kept; names it.
        """
        return {part: tree_digest(getattr(self, part)) for part in DIGESTED}

    def copied(self) -> Snapshot:
        """Return a copy with tensors of its own."""
        return Snapshot(self.step, *(_with_own_tensors(*flatten(getattr(self, part))) for part in PARTS))


def as_tree(snapshot: Snapshot) -> list[Any]:
    """A snapshot as a tree that can be broadcast: the arguments of its type."""
    return [snapshot.step, snapshot.model, snapshot.optimizer, snapshot.state]


def as_snapshot(tree: Any) -> Snapshot:
    """The inverse of :func:`as_tree`, for a tree that another worker has sent.

    Raises:
        CheckpointError: the tree is no snapshot.
    """
    match tree:
        case [int(step), dict(model), list(optimizer), dict(state)] if step >= 0:
            return Snapshot(step, model, optimizer, state)
    raise CheckpointError(f"{short(tree)} is no state of a run: another worker has sent it")


@dataclass(frozen=True)
class FrozenSnapshot:
    """A copy of a snapshot, or of a share of it, on the CPU, taken apart for writing. Later updates do not change it.

    Attributes:
        step: the number of committed steps.
        text: the content of ``state.json``.
        copies: copies of the tensors of each part that this process writes, by name; see :attr:`tensors`.
        verified: digests on which all workers agreed before it was copied; None if they were not compared.
        names: the names of all tensors of each part.
        trained: the names of the parameters that are trained, as far as the snapshot has them.
        registered: the digest of position and registered objects, from before it was copied; 0 for a share.
        handovers: the events after which the copies are complete, one for each device from which they come.
    """

    step: int
    text: dict[str, Any]
    copies: dict[str, dict[str, Tensor]]
    verified: Digests | None = None
    names: Mapping[str, list[str]] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    registered: int = 0
    handovers: tuple[Handover, ...] = ()

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The copies, once they are complete. Only readers wait for the devices, not the step that makes the copies."""
        for handover in self.handovers:
            handover.wait()
        return self.copies

    @classmethod
    def of(cls, snapshot: Snapshot, verified: Digests | None = None, share: Share = WHOLE) -> FrozenSnapshot:
        """Copy a snapshot, or this process's share of it, which is a collective call.

        Raises:
            CheckpointError: it holds something that cannot be kept; names it.
        """
        text: dict[str, Any] = {"step": snapshot.step}
        tensors: dict[str, dict[str, Tensor]] = {}

        def take_apart() -> None:
            for part in PARTS:
                text[part], tensors[part] = flatten(getattr(snapshot, part), hollow=share is not WHOLE)
                require_kept(tensors[part])

        share.together(take_apart)
        registered = flat_digest(text["state"], tensors["state"]) if share is WHOLE else 0
        own = {part: copies(tensors[part], share.copy) for part in PARTS}
        trained = snapshot.state.get("trained", ()) if isinstance(snapshot.state, dict) else ()
        names = {part: list(tensors[part]) for part in PARTS}
        devices = {tensor.device for part in PARTS for tensor in tensors[part].values()}
        handovers = tuple(map(Handover, devices))
        return cls(snapshot.step, text, own, verified, names, frozenset(trained), registered, handovers)

    def require_verified(self) -> None:
        """Refuse a copy that differs from the state that all workers held.

        Raises:
            CheckpointError: a bit of it has changed.
        """
        if self.verified is not None and self.digests() != self.verified:
            raise CheckpointError("its copy in memory is not what all workers held: a bit has flipped")
        if self.registered and flat_digest(self.text["state"], self.tensors["state"]) != self.registered:
            raise CheckpointError("its copy in memory of registered objects is not what they held: a bit has flipped")

    def thawed(self) -> Snapshot:
        """The snapshot again, with tensors of its own."""
        return Snapshot(self.step, *(_with_own_tensors(self.text[part], self.tensors[part]) for part in PARTS))

    def digests(self) -> Digests:
        """The digests of the copy: those of :meth:`Snapshot.digests`, unless a bit of the copy has changed."""
        return {part: flat_digest(self.text[part], self.tensors[part]) for part in DIGESTED}

    def write(self, folder: Path, share: Share = WHOLE, written_by: Mapping[str, int] = NOBODY) -> int:
        """Write the snapshot into an empty folder, the manifest last; a share is written with other processes.

        ``written_by`` is the writer's term and generation, for the manifest. Return the number of bytes.

        Raises:
            CheckpointError: another process cannot write its share, or a tensor is in no share or in two.
            OSError: it cannot be written; the disk is full, say.
        """
        replies = share.together(
            lambda: [
                self._write_share(folder, share),
                {part: list(self.tensors[part]) for part in PARTS},
                self._not_finite(),
            ]
        )
        written = [value_of(_Written, reply, "what a device has written") for reply in replies]
        (size, *_) = share.together(lambda: self._write_rest(folder, written, written_by) if share.is_first else 0)
        return size

    def _write_share(self, folder: Path, share: Share) -> dict[str, Any]:
        """Write this process's tensors; return the manifest's entries for the files."""
        ending = f"-{share.number}.safetensors" if share.number else ".safetensors"
        files = {
            f"{part}{ending}": _write(folder / f"{part}{ending}", pieces(self.tensors[part]))
            for part in PARTS
            if share.is_first or self.tensors[part]
        }
        failpoint("checkpoint share written")
        return files

    def _not_finite(self) -> list[str]:
        """The names of the tensors that are not finite. Buffers may hold infinities, as masks do, but no NaN."""
        return [
            name
            for part in DIGESTED
            for name, tensor in self.tensors[part].items()
            if not is_finite([tensor]) and (part != "model" or name in self.trained or bool(tensor.isnan().any()))
        ]

    def _write_rest(self, folder: Path, written: Sequence[_Written], written_by: Mapping[str, int]) -> int:
        for part, names in self.names.items():
            require_each_once(names, [names_of.get(part, []) for _, names_of, _ in written], part)
        files = {name: entry for entries, _, _ in written for name, entry in entries.items()}
        not_finite = sorted(name for _, _, names in written for name in names)
        files[STATE] = _write(folder / STATE, [json.dumps(self.text, allow_nan=False).encode()])
        manifest: dict[str, Any] = {"format": FORMAT, "step": self.step, **written_by, "files": files}
        manifest["not_finite"] = {"tensors": len(not_finite), "first": not_finite[:NAMED]}
        manifest["verified"] = self.verified is not None
        if self.verified is not None:
            digests = {**self.verified, **({"state": self.registered} if self.registered else {})}
            manifest["digests"] = {part: f"{digest:016x}" for part, digest in digests.items()}
        manifest["sha256"] = _own_digest(manifest)
        manifest_entry = _write(folder / MANIFEST, [json.dumps(manifest, indent=2).encode()])
        sync_folder(folder)
        return sum(entry["bytes"] for entry in [*files.values(), manifest_entry])


def _with_own_tensors(text: Any, tensors: Mapping[str, Tensor]) -> Any:
    return unflatten(text, {name: tensor.clone() for name, tensor in tensors.items()})


def read_snapshot(path: Path, read: Callable[[Path], dict[str, Tensor]] = read_tensors) -> Snapshot:
    """Read one checkpoint's folder.

    Raises:
        CheckpointError: a file is missing, cut off or changed; names it.
    """
    step, trees = _read(path, PARTS, read)
    return Snapshot(step, **trees)


def read_some(path: Path, cut: Callable[[Snapshot], Snapshot]) -> Snapshot:
    """Read the part of a checkpoint that a process needs, without memory for all of it.

    ``cut`` returns that part of a snapshot whose tensors are mapped from the files.

    Raises:
        CheckpointError: a file is missing, cut off or changed; names it.
    """
    return cut(read_snapshot(path, mapped_tensors)).copied()


def read_model(path: Path) -> dict[str, Any]:
    """Read the parameters and buffers in one checkpoint's folder, and none of its other parts.

    Raises:
        CheckpointError: a file is missing, cut off or changed; names it.
    """
    model: dict[str, Any] = _read(path, ("model",), read_tensors)[1]["model"]
    return model


@dataclass(frozen=True)
class Health:
    """The number of tensors of a checkpoint with NaN or infinities, and the names of the first."""

    tensors: int = 0
    first: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path) -> Health:
        """Read the manifest in a folder. Older manifests have no such entry; reading the snapshot finds damage."""
        try:
            entry = read_object(path / MANIFEST).get("not_finite", {"tensors": 0, "first": []})
            health: Health = value_of(cls, entry, "not_finite")
        except (OSError, Unreadable):
            return cls()
        return health


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, so that a rename survives a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: Iterable[bytes | memoryview]) -> dict[str, Any]:
    size, digest = 0, hashlib.sha256()
    with path.open("wb") as file:
        for piece in content:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _read(path: Path, parts: Sequence[str], read: Callable[[Path], dict[str, Tensor]]) -> tuple[int, dict[str, Any]]:
    """The step, and some parts, after a check of size and sha256 of all files that they need."""
    manifest = _read_manifest(path)
    listed, files = manifest["files"], {part: [f"{part}.safetensors"] for part in parts}
    for name in listed:
        if (match := _FILE.fullmatch(name)) and match[2] and match[1] in files:
            files[match[1]].append(name)
    for name in (STATE, *chain.from_iterable(files.values())):
        if name not in listed:
            raise CheckpointError(f"{path / MANIFEST} does not list {name}: it is no whole checkpoint")
        _check(path / name, listed[name]["bytes"], listed[name]["sha256"])
    try:
        text = read_object(path / STATE)
    except (OSError, Unreadable) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from error
    step = text.get("step")
    if type(step) is not int or not 0 <= step < 2**63 or any(part not in text for part in parts):
        raise CheckpointError(f"{path / STATE} lacks the step, or the model: it is no whole checkpoint")
    trees = {part: _read_part(path, part, text[part], files[part], read) for part in parts}
    _require_digests(path, manifest.get("digests"), trees)
    return step, trees


def _read_part(
    path: Path, part: str, text: Any, files: Sequence[str], read: Callable[[Path], dict[str, Tensor]]
) -> Any:
    tensors: dict[str, Tensor] = {}
    try:
        for name in files:
            read_here = read(path / name)
            if twice := sorted(read_here.keys() & tensors.keys()):
                raise CheckpointError(f"{short(twice[0])} is in {name} and in another file")
            tensors |= read_here
        return unflatten(text, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: its {part} cannot be read: {error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest, with size and sha256 of each file, and check its own sha256."""
    try:
        manifest = read_object(path / MANIFEST)
        version, digest, own = manifest["format"], manifest.pop("sha256"), _own_digest(manifest)
        manifest["files"] = {
            name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in manifest["files"].items()
        }
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}: it is no whole checkpoint") from None
    except (OSError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {short(version)}, this version of Unisono reads format {FORMAT}")
    if own != digest:
        raise CheckpointError(f"{path / MANIFEST} has another sha256 than it says of itself: its contents changed")
    return manifest


def _require_digests(path: Path, written: Any, trees: Mapping[str, Any]) -> None:
    """Refuse trees whose digests differ from those on which all workers agreed when they were written."""
    if written is None:
        return
    for part, tree in trees.items():
        if part not in DIGESTED and isinstance(written, dict) and part not in written:
            continue  # older checkpoints have no digest of the part "state"
        if not isinstance(written, dict) or written.get(part) != f"{tree_digest(tree):016x}":
            raise CheckpointError(f"{path}: its {part} is not what all workers held when it was written")


def _own_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check(path: Path, size: int, sha256: str) -> None:
    try:
        with open_file(path) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                raise CheckpointError(f"{path} has {actual} bytes instead of {size}: it was cut off or replaced")
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise CheckpointError(f"{path} has another sha256 than its manifest: its contents changed")
    except (OSError, Unreadable) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
