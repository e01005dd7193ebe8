"""One checkpoint: a run's state at a step, in a folder of its own."""

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

from unisono.checkpoint.codec import flatten, unflatten
from unisono.checkpoint.quick_digest import flat_digest, tree_digest
from unisono.checkpoint.tensors import (
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
from unisono.finite import is_finite
from unisono.received import open_file, read_object, short, value_of

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
NOBODY: Mapping[str, int] = {}
PARTS = ("model", "optimizer", "state")
DIGESTED = ("model", "optimizer")
"""What an update changes."""

NAMED = 8
"""Tensors that are not finite, of which a manifest gives the names."""

_WRITTEN = tuple[dict[str, dict[str, Any]], dict[str, list[str]], list[str]]
"""What a process says that it has written: what the manifest says of its files, the names of tensors by part, and of
those that are not finite."""

_FILE = re.compile(rf"({'|'.join(PARTS)})(-[1-9][0-9]{{0,5}})?\.safetensors")

Digests = dict[str, int]
"""Quick digests, of 64 bits each, by part."""


@dataclass(frozen=True)
class Snapshot:
    """Everything a run needs to go on, and nothing that depends on the number of workers.

    Attributes:
        step: the number of committed steps.
        model: the modules' ``state_dict``: parameters and buffers by name.
        optimizer: the optimizers' state.
        state: position, registered objects, whose state this is.
    """

    step: int
    model: dict[str, Any]
    optimizer: Any
    state: Any

    def digests(self) -> Digests:
        """Quick digests of what an update changes.

        Raises:
            CheckpointError: it holds something that cannot be kept; names it.
        """
        return {part: tree_digest(getattr(self, part)) for part in DIGESTED}

    def copied(self) -> "Snapshot":
        """The same with tensors of its own."""
        flat = (flatten(getattr(self, part)) for part in PARTS)
        return Snapshot(
            self.step,
            *(unflatten(text, {name: each.clone() for name, each in tensors.items()}) for text, tensors in flat),
        )


@dataclass(frozen=True)
class FrozenSnapshot:
    """A copy of a snapshot, or of a share of it, on the CPU, taken apart for writing: later updates do not reach it.

    Attributes:
        step: the number of committed steps.
        text: the content of ``state.json``.
        copies: copies of the tensors of each part that this process writes, by name; see :attr:`tensors`.
        verified: digests on which all workers agreed before it was copied; None if they were not compared.
        names: the names of all tensors of each part.
        trained: the names of the parameters that are trained, as far as they are known.
        registered: a digest of position and registered objects, from before it was copied; 0 for a share.
        arrived: the moments at which the copies are there, one for each device that they come from.
    """

    step: int
    text: dict[str, Any]
    copies: dict[str, dict[str, Tensor]]
    verified: Digests | None = None
    names: Mapping[str, list[str]] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    registered: int = 0
    arrived: tuple[Handover, ...] = ()

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The copies, once they are there: a step that makes them waits for no device."""
        for moment in self.arrived:
            moment.wait()
        return self.copies

    @classmethod
    def of(cls, snapshot: Snapshot, verified: Digests | None = None, share: Share = WHOLE) -> "FrozenSnapshot":
        """Copy a snapshot, or this process's share of it. Then it is collective.

        Raises:
            CheckpointError: it holds something that cannot be kept; names it.
        """
        text: dict[str, Any] = {"step": snapshot.step}
        found: dict[str, dict[str, Tensor]] = {}

        def take_apart() -> None:
            for part in PARTS:
                text[part], found[part] = flatten(getattr(snapshot, part), hollow=share is not WHOLE)
                require_kept(found[part])

        share.together(take_apart)
        registered = flat_digest(text["state"], found["state"]) if share is WHOLE else 0
        tensors = {part: copies(found[part], share.copy) for part in PARTS}
        trained = snapshot.state.get("trained", ()) if isinstance(snapshot.state, dict) else ()
        names = {part: list(found[part]) for part in PARTS}
        devices = {each.device for part in PARTS for each in found[part].values()}
        arrived = tuple(map(Handover, devices))
        return cls(snapshot.step, text, tensors, verified, names, frozenset(trained), registered, arrived)

    def require_verified(self) -> None:
        """Refuse a copy that is not what all workers held.

        Raises:
            CheckpointError: a bit of it has changed.
        """
        if self.verified is not None and self.digests() != self.verified:
            raise CheckpointError("its copy in memory is not what all workers held: a bit has flipped")
        if self.registered and flat_digest(self.text["state"], self.tensors["state"]) != self.registered:
            raise CheckpointError("its copy in memory of registered objects is not what they held: a bit has flipped")

    def thawed(self) -> Snapshot:
        """The snapshot again, with tensors of its own."""
        parts = [
            unflatten(self.text[part], {name: each.clone() for name, each in self.tensors[part].items()})
            for part in PARTS
        ]
        return Snapshot(self.step, *parts)

    def digests(self) -> Digests:
        """As :meth:`Snapshot.digests` of the snapshot of which this is a copy: others, if the copy has changed."""
        return {part: flat_digest(self.text[part], self.tensors[part]) for part in DIGESTED}

    def write(self, folder: Path, share: Share = WHOLE, written_by: Mapping[str, int] = NOBODY) -> int:
        """Write everything into an empty folder, the manifest last. With others, if this is a share.

        Args:
            folder: an existing folder of a checkpoint.
            share: the share of it that this is.
            written_by: the turn in which it was written, for the manifest.

        Returns:
            the number of bytes.

        Raises:
            CheckpointError: another process cannot write its share, or the shares are not all of it.
            OSError: it cannot be written; the disk is full, say.
        """
        told = share.together(
            lambda: [
                self._write_share(folder, share),
                {part: list(self.tensors[part]) for part in PARTS},
                self._not_finite(),
            ]
        )
        each = [value_of(_WRITTEN, one, "what a device has written") for one in told]
        (size, *_) = share.together(lambda: self._write_rest(folder, each, written_by) if share.is_first else 0)
        return size

    def _write_share(self, folder: Path, share: Share) -> dict[str, Any]:
        """What only this process has; returns what the manifest says of the files."""
        ending = f"-{share.number}.safetensors" if share.number else ".safetensors"
        files = {
            f"{part}{ending}": _write(folder / f"{part}{ending}", pieces(self.tensors[part]))
            for part in PARTS
            if share.is_first or self.tensors[part]
        }
        failpoint("checkpoint share written")
        return files

    def _not_finite(self) -> list[str]:
        """The tensors that an update has spoiled. Buffers may hold infinities, a mask say, but no NaN."""
        odd = [(part, name) for part in DIGESTED for name, one in self.tensors[part].items() if not is_finite([one])]
        return [
            name
            for part, name in odd
            if part != "model" or name in self.trained or bool(self.tensors[part][name].isnan().any())
        ]

    def _write_rest(
        self,
        folder: Path,
        written: Sequence[tuple[dict[str, Any], dict[str, list[str]], list[str]]],
        written_by: Mapping[str, int],
    ) -> int:
        for part, names in self.names.items():
            require_each_once(names, [each.get(part, []) for _, each, _ in written], part)
        files = {name: entry for each, _, _ in written for name, entry in each.items()}
        odd = sorted(name for _, _, each in written for name in each)
        files[STATE] = _write(folder / STATE, [json.dumps(self.text, allow_nan=False).encode()])
        manifest: dict[str, Any] = {"format": FORMAT, "step": self.step, **written_by, "files": files}
        manifest["not_finite"] = {"tensors": len(odd), "first": odd[:NAMED]}
        manifest["verified"] = self.verified is not None
        if self.verified is not None:
            digests = {**self.verified, **({"state": self.registered} if self.registered else {})}
            manifest["digests"] = {part: f"{digest:016x}" for part, digest in digests.items()}
        manifest["sha256"] = _own_digest(manifest)
        last = _write(folder / MANIFEST, [json.dumps(manifest, indent=2).encode()])
        sync_folder(folder)
        return sum(each["bytes"] for each in [*files.values(), last])


def read_snapshot(path: Path, read: Callable[[Path], dict[str, Tensor]] = read_tensors) -> Snapshot:
    """Read one checkpoint's folder.

    Args:
        path: the folder.
        read: a function that gives the tensors of one of its files.

    Raises:
        CheckpointError: a file is missing, cut off or changed; names it.
    """
    text, files = _read_text(path, PARTS)
    found = Snapshot(text["step"], *(_read_part(path, part, text, files, read) for part in PARTS))
    _require_digests(path, {part: getattr(found, part) for part in PARTS})
    return found


def read_some(path: Path, cut: Callable[[Snapshot], Snapshot]) -> Snapshot:
    """Read what a process needs of one checkpoint's folder, without room for all of it.

    Args:
        path: the folder.
        cut: a function that leaves a part of a snapshot, whose tensors lie in the files.

    Raises:
        CheckpointError: a file is missing, cut off or changed; names it.
    """
    return cut(read_snapshot(path, mapped_tensors)).copied()


def read_model(path: Path) -> dict[str, Any]:
    """Read the parameters and buffers in one checkpoint's folder; its other parts are not looked at.

    Raises:
        CheckpointError: a file is missing, cut off or changed; names it.
    """
    found: dict[str, Any] = _read_part(path, "model", *_read_text(path, ["model"]))
    _require_digests(path, {"model": found})
    return found


@dataclass(frozen=True, order=True)
class Health:
    """How many tensors of a checkpoint hold NaN or infinities, and the names of the first."""

    tensors: int = 0
    first: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path) -> "Health":
        """As the manifest in a folder says; older ones say nothing, and whoever reads a damaged one finds that out."""
        try:
            told = read_object(path / MANIFEST).get("not_finite", {"tensors": 0, "first": []})
            found: Health = value_of(cls, told, "not_finite")
        except (OSError, Unreadable):
            return cls()
        return found


def sync_folder(path: Path) -> None:
    """Have the system write down which names a folder holds."""
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


def _read_text(path: Path, parts: Iterable[str]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """What ``state.json`` says, once it and these parts' tensors are known to be whole; and the files of each part."""
    listed = _read_manifest(path)
    files: dict[str, list[str]] = {part: [f"{part}.safetensors"] for part in parts}
    for name in listed:
        if (match := _FILE.fullmatch(name)) and match[2] and match[1] in files:
            files[match[1]].append(name)
    for name in (STATE, *chain.from_iterable(files.values())):
        if name not in listed:
            raise CheckpointError(f"{path / MANIFEST} does not list {name}: it is no whole checkpoint")
        _check(path / name, *listed[name])
    try:
        text = read_object(path / STATE)
    except (OSError, Unreadable) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from error
    if type(step := text.get("step")) is not int or not 0 <= step < 2**63 or any(part not in text for part in parts):
        raise CheckpointError(f"{path / STATE} lacks the step, or the model: it is no whole checkpoint")
    return text, files


def _read_part(
    path: Path,
    part: str,
    text: Mapping[str, Any],
    files: Mapping[str, Sequence[str]],
    read: Callable[[Path], dict[str, Tensor]] = read_tensors,
) -> Any:
    tensors: dict[str, Tensor] = {}
    try:
        for name in files[part]:
            found = read(path / name)
            if twice := sorted(found.keys() & tensors.keys()):
                raise CheckpointError(f"{short(twice[0])} is in {name} and in another file")
            tensors |= found
        return unflatten(text[part], tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: its {part} cannot be read: {error}") from error


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of each file."""
    try:
        manifest = read_object(path / MANIFEST)
        version, digest, own = manifest["format"], manifest.pop("sha256"), _own_digest(manifest)
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}: it is no whole checkpoint") from None
    except (OSError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {short(version)}, this version of Unisono reads format {FORMAT}")
    if own != digest:
        raise CheckpointError(f"{path / MANIFEST} has another sha256 than it says of itself: its contents changed")
    return listed


def _require_digests(path: Path, parts: Mapping[str, Any]) -> None:
    """Refuse what was read if it is not what all workers held when it was written."""
    try:
        told = read_object(path / MANIFEST).get("digests")
    except (OSError, Unreadable) as error:  # a running job may have removed it meanwhile
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if told is None:
        return
    for part, tree in parts.items():
        if part not in DIGESTED and isinstance(told, dict) and part not in told:
            continue  # an older one
        if not isinstance(told, dict) or told.get(part) != f"{tree_digest(tree):016x}":
            raise CheckpointError(f"{path}: its {part} is not what all workers held when it was written")


def _own_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check(path: Path, size: int, sha256: str) -> None:
    try:
        with open_file(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise CheckpointError(f"{path} has {found} bytes instead of {size}: it was cut off or replaced")
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise CheckpointError(f"{path} has another sha256 than its manifest: its contents changed")
    except (OSError, Unreadable) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
