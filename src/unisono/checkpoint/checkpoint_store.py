"""Checkpoints on disk: written beside, checked, and moved into place in one piece."""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import psutil

from unisono.checkpoint.snapshot import (
    MANIFEST,
    NAMED,
    Digests,
    FrozenSnapshot,
    Health,
    Snapshot,
    read_model,
    read_snapshot,
    sync_folder,
)
from unisono.checkpoint.tensor_bytes import WHOLE, Share
from unisono.checkpoint.writer import Writer, origin
from unisono.errors import CheckpointError, Superseded, WorkerLost
from unisono.host.tracebacks import warn
from unisono.received import short, value_of
from unisono.telemetry import TelemetrySpan, begin

SILENT_S = 3600.0
"""A temporary folder of a host or container whose processes cannot be seen from here is given up after this long."""

_CHECKPOINT = re.compile(r"step-([0-9]{8,})(\.old)?")
_TEMPORARY = re.compile(r"\.tmp-([0-9]+)-[0-9a-f]+-(.*)")

S = TypeVar("S")


class CheckpointStore:
    """The checkpoints of one run, as folders ``step-00000020``.

    Args:
        keep: the number of checkpoints that stay; older ones are removed.
        on_event: a function that gets what happened, for the journal; also called from the thread that writes.
        writer: this worker's right to write here; None if nobody else writes.

    Attributes:
        seconds: the duration of the newest checkpoint, from :meth:`save` until it was on disk; 0 before the first.
    """

    def __init__(
        self, folder: Path, *, keep: int = 3, on_event: Callable[..., None] | None = None, writer: Writer | None = None
    ) -> None:
        self._folder = Path(folder).absolute()
        self._keep, self._rights = keep, writer
        self._report = on_event or (lambda event, **fields: None)
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[str | None] | None = None
        self.seconds = 0.0
        for left in self._folder.glob(".tmp-*"):
            with suppress(OSError):  # another worker was faster, or it is not ours to remove: it does no harm
                if _is_abandoned(left):
                    _remove(left)

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, whole or not, oldest first."""
        return sorted({step for step, _ in _checkpoints(self._folder)})

    def save(self, snapshot: Snapshot, verified: Digests | None = None, share: Share = WHOLE) -> None:
        """Copy a snapshot now and write it in the background. With others, each of which has a store, if it is a share.

        One is written at a time: the next waits for it, so there is never more than one copy of the state. If it cannot
        be written (a full disk, say), a warning says so at the next call of a method here; the checkpoints before it
        stay as they are. ``verified`` are digests on which all workers have agreed: what was written gets its name only
        if they are still those of the copy.

        Raises:
            CheckpointError: the state holds something that cannot be kept; names it.
            Superseded: the job goes on without this worker.
            WorkerLost: another process that writes a share is gone.
        """
        self.wait()
        why = self._rights.obstacle() if share.is_first and self._rights is not None else ""
        if share.gather(why)[0]:
            if share.is_first:
                self._report("checkpoint failed", step=snapshot.step, error=why)
                warn(f"no checkpoint of step {snapshot.step} is written: {why}")
            return
        begun, span = perf_counter(), begin("checkpoint", {"step": snapshot.step})
        frozen = FrozenSnapshot.of(snapshot, verified, share)
        write = partial(self._write, frozen, share, begun, span)
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="unisono-checkpoint")
        try:
            self._pending = self._writer.submit(write)
        except RuntimeError:  # the process exits: no thread takes anything more
            written: Future[str | None] = Future()
            written.set_result(write())
            self._pending = written

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; warn of what went wrong."""
        pending, self._pending = self._pending, None
        trouble = pending.result() if pending is not None else None
        if trouble is not None:
            warn(trouble)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, so that nobody goes on from them.

        Raises:
            OSError: one cannot be removed.
            Superseded: the job goes on without this worker.
        """
        self.wait()
        with self._placing():
            for later, path in _checkpoints(self._folder):
                if later > step:
                    self._discard(path)
                    self._report("checkpoint discarded", step=later, reason="audits have not confirmed it")

    def newest(self, read: Callable[[Path], S] = read_snapshot) -> S | None:  # type: ignore[assignment]
        """The newest whole checkpoint; None if there is none at all.

        Damaged ones are passed over with a warning that names the file, and so are those with weights or optimizer
        state that are not finite, as long as there is one with fewer of them.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged; lists them.
        """
        self.wait()
        return _newest(self._folder, read, self._report)

    def close(self) -> None:
        """Wait for the checkpoint that is being written; warn if it failed."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def _write(self, frozen: FrozenSnapshot, share: Share, begun: float, span: TelemetrySpan) -> str | None:
        """Write a checkpoint, and remove old ones; return what went wrong, in words, if it is to be reported."""
        try:
            trouble = self._try(frozen, share, begun, span)
            if trouble is not None:
                span.fail(trouble)
            return trouble
        finally:
            span.end()

    def _try(self, frozen: FrozenSnapshot, share: Share, begun: float, span: TelemetrySpan) -> str | None:
        try:
            written = self._place(frozen, share)
        except (Superseded, WorkerLost) as error:
            return f"the checkpoint of step {frozen.step} was not written: {error}"
        except (OSError, CheckpointError) as error:
            if not share.is_first:
                return None
            self._report("checkpoint failed", step=frozen.step, error=str(error))
            return (
                f"the checkpoint of step {frozen.step} could not be written: {error}. Training goes on, and the "
                f"checkpoints before it are as they were; make room, or lower keep="
            )
        self.seconds = perf_counter() - begun
        span.note({"bytes": written, "verified": frozen.verified is not None})
        if not share.is_first:
            return None
        about = {} if frozen.verified is None else {"verified": True}
        self._report("checkpoint", step=frozen.step, bytes=written, seconds=round(self.seconds, 6), **about)
        return self._remove_older(frozen.step)

    def _place(self, frozen: FrozenSnapshot, share: Share) -> int:
        temporary = self._temporary()
        try:
            (folder, *_) = share.together(lambda: _made(temporary) if share.is_first else "")
            about = {} if self._rights is None else self._rights.about
            written = frozen.write(Path(value_of(str, folder, "a folder")), share, about)
            frozen.require_verified()
            share.together(lambda: self._rename(temporary, self._path(frozen.step)) if share.is_first else None)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return written

    def _rename(self, temporary: Path, target: Path) -> None:
        spare = target.with_name(f"{target.name}.old")
        with self._placing():
            if target.exists():
                # One of the two is under a name that is looked at, whenever this process ends.
                self._discard(spare)
                target.rename(spare)
            temporary.rename(target)
        sync_folder(self._folder)

    def _remove_older(self, step: int) -> str | None:
        # Newer ones are those that were too damaged to go on from: they do not count.
        older = [before for before in self.steps() if before < step]
        surplus = older[: max(0, len(older) - self._keep + 1)]
        there = _checkpoints(self._folder)
        spared, _ = _healthiest([checkpoint for checkpoint in there if checkpoint[0] <= step])
        try:
            for number, path in there:
                if (number in surplus and number != spared) or (number == step and path != self._path(step)):
                    self._discard(path)
        except OSError as error:
            self._report("checkpoint not removed", error=str(error))
            return f"the checkpoint of step {step} is written, but an older one could not be removed: {error}"
        return None

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint, if there is one: under another name, so that half of it is never taken for one."""
        if path.exists():
            temporary = self._temporary()
            path.rename(temporary)
            _remove(temporary)

    def _placing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._rights is None else self._rights.placing()

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _temporary(self) -> Path:
        return self._folder / f".tmp-{os.getpid()}-{secrets.token_hex(4)}-{origin()}"


def load_weights(path: str | Path) -> dict[str, Any]:
    """The model's state by name, from a checkpoint's folder, or from the newest whole one of a run folder.

    Raises:
        CheckpointError: there is none, or none is whole.
    """
    path = Path(path)
    if not path.is_dir():
        trouble = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {trouble}: name a run folder, or a folder checkpoints/step-… in one")
    if (path / MANIFEST).exists() or _CHECKPOINT.fullmatch(path.name):
        return read_model(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    weights = _newest(folder, read_model, lambda event, **fields: None)
    if weights is None:
        raise CheckpointError(f"{path} holds no checkpoint: name a run folder, or a folder checkpoints/step-… in one")
    return weights


def _newest(folder: Path, read: Callable[[Path], S], report: Callable[..., None]) -> S | None:
    damage: dict[Path, str] = {}
    tried: set[Path] = set()
    # Looked up again after each failure: a running job may have written a newer one, and removed this one.
    while untried := [checkpoint for checkpoint in _checkpoints(folder) if checkpoint[1] not in tried]:
        step, path = _healthiest(untried)
        tried.add(path)
        try:
            result = read(path)
        except CheckpointError as error:
            if path.exists():
                damage[path] = str(error)
                report("checkpoint damaged", step=step, error=str(error))
            continue
        for newer, odd in untried[untried.index((step, path)) + 1 :]:
            names = ", ".join(map(short, Health.of(odd).first[:NAMED]))
            damage[odd] = f"{odd} holds weights or optimizer state that are NaN or infinite: {names}"
            report("checkpoint not finite", step=newer, tensors=names)
        if damage:
            skipped = "; ".join(damage.values())
            warn(f"goes on from step {step}, since {skipped}")
        return result
    if damage:
        listed = "\n  ".join(damage.values())
        raise CheckpointError(f"no checkpoint in {folder} is whole:\n  {listed}\nRestore one, or start in a new folder")
    return None


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints by step, whole or not, oldest first; before each the one that it was about to replace."""
    folders = [(_CHECKPOINT.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir()]
    ordered = sorted((int(match[1]), match[2] is None, path) for match, path in folders if match)
    return [(step, path) for step, _, path in ordered]


def _healthiest(checkpoints: list[tuple[int, Path]]) -> tuple[int, Path]:
    """The one to go on from: the newest of those with the fewest tensors that are not finite."""
    return min(reversed(checkpoints), key=lambda checkpoint: Health.of(checkpoint[1]).tensors)


def _is_abandoned(temporary: Path) -> bool:
    """Whether nobody writes here any more."""
    match = _TEMPORARY.fullmatch(temporary.name)
    if match is None:
        return False  # not from here
    pid, mark = int(match[1]), match[2]
    if mark == origin():
        return pid == os.getpid() or not psutil.pid_exists(pid)
    last_change = max(path.stat().st_mtime for path in [temporary, *temporary.iterdir()])
    return time.time() - last_change > SILENT_S


def _made(folder: Path) -> str:
    folder.mkdir(parents=True)
    return str(folder)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
