"""Checkpoints on disk: each is written into a temporary folder, checked, and renamed."""

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
"""After this time without a change, a temporary folder of another host or container is removed."""

_CHECKPOINT = re.compile(r"step-([0-9]{8,})(\.old)?")
_TEMPORARY = re.compile(r"\.tmp-([0-9]+)-[0-9a-f]+-(.*)")

S = TypeVar("S")


class CheckpointStore:
    """The checkpoints of one run, as folders ``step-00000020``.

    Args:
        keep: the number of checkpoints that stay; older ones are removed.
        on_event: a function that gets each event for the journal; also called from the thread that writes.
        writer: this worker's right to write here; None if no other worker can write here.

    Attributes:
        seconds: the duration of the newest checkpoint, from :meth:`save` until it was on disk; 0 before the first.
    """

    def __init__(
        self, folder: Path, *, keep: int = 3, on_event: Callable[..., None] | None = None, writer: Writer | None = None
    ) -> None:
        self._folder = Path(folder).absolute()
        self._keep, self._writer = keep, writer
        self._report = on_event or (lambda event, **fields: None)
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[str | None] | None = None
        self.seconds = 0.0
        for temporary in self._folder.glob(".tmp-*"):
            with suppress(OSError):  # another worker has removed it, or may remove it: it does no harm
                if _is_abandoned(temporary):
                    _remove(temporary)

    def steps(self) -> list[int]:
        """The steps of all checkpoints, whole or not, oldest first."""
        return sorted({step for step, _ in _checkpoints(self._folder)})

    def save(self, snapshot: Snapshot, verified: Digests | None = None, share: Share = WHOLE) -> None:
        """Copy a snapshot now and write it in the background. A share is a collective call of several stores.

        One is written at a time: the next waits for it, so there is never more than one copy of the state. If it cannot
        be written (a full disk, say), a warning says so at the next call of a method here; earlier checkpoints stay as
        they are. ``verified`` are digests on which all workers have agreed: only if the copy still has them does the
        checkpoint get its name.

        Raises:
            CheckpointError: the state holds something that cannot be kept; names it.
            Superseded: the job goes on without this worker.
            WorkerLost: another process that writes a share is gone.
        """
        self.wait()
        why = self._writer.obstacle() if share.is_first and self._writer is not None else ""
        if share.gather(why)[0]:
            if share.is_first:
                self._report("checkpoint failed", step=snapshot.step, error=why)
                warn(f"no checkpoint of step {snapshot.step} is written: {why}")
            return
        started_at, span = perf_counter(), begin("checkpoint", {"step": snapshot.step})
        frozen = FrozenSnapshot.of(snapshot, verified, share)
        write = partial(self._write, frozen, share, started_at, span)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="unisono-checkpoint")
        try:
            self._pending = self._executor.submit(write)
        except RuntimeError:  # the interpreter exits: executors accept no more work
            result: Future[str | None] = Future()
            result.set_result(write())
            self._pending = result

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; warn if that has failed."""
        pending, self._pending = self._pending, None
        problem = pending.result() if pending is not None else None
        if problem is not None:
            warn(problem)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, so that no run goes on from them.

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

        A damaged checkpoint is passed over with a warning that names the file; so is one with weights or optimizer
        state that are not finite, as long as there is another with fewer such tensors.

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
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def _write(self, frozen: FrozenSnapshot, share: Share, started_at: float, span: TelemetrySpan) -> str | None:
        """Write a checkpoint, and remove old ones; return the problem to warn of, None if there is none."""
        try:
            problem = self._try_write(frozen, share, started_at, span)
            if problem is not None:
                span.fail(problem)
            return problem
        finally:
            span.end()

    def _try_write(self, frozen: FrozenSnapshot, share: Share, started_at: float, span: TelemetrySpan) -> str | None:
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
        self.seconds = perf_counter() - started_at
        span.note({"bytes": written, "verified": frozen.verified is not None})
        if not share.is_first:
            return None
        fields = {} if frozen.verified is None else {"verified": True}
        self._report("checkpoint", step=frozen.step, bytes=written, seconds=round(self.seconds, 6), **fields)
        return self._remove_older(frozen.step)

    def _place(self, frozen: FrozenSnapshot, share: Share) -> int:
        temporary = self._temporary()
        try:
            (folder, *_) = share.together(lambda: _make(temporary) if share.is_first else "")
            turn = {} if self._writer is None else self._writer.about
            written = frozen.write(Path(value_of(str, folder, "a folder")), share, turn)
            frozen.require_verified()
            share.together(lambda: self._rename(temporary, self._path(frozen.step)) if share.is_first else None)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return written

    def _rename(self, temporary: Path, target: Path) -> None:
        old = target.with_name(f"{target.name}.old")
        with self._placing():
            if target.exists():
                # Whenever this process is killed, one of the two has a name at which checkpoints are looked for.
                self._discard(old)
                target.rename(old)
            temporary.rename(target)
        sync_folder(self._folder)

    def _remove_older(self, step: int) -> str | None:
        # Newer checkpoints were too damaged for the run to go on from: they do not count.
        older = [earlier for earlier in self.steps() if earlier < step]
        surplus = older[: max(0, len(older) - self._keep + 1)]
        checkpoints = _checkpoints(self._folder)
        healthiest, _ = _healthiest([checkpoint for checkpoint in checkpoints if checkpoint[0] <= step])
        try:
            for number, path in checkpoints:
                if (number in surplus and number != healthiest) or (number == step and path != self._path(step)):
                    self._discard(path)
        except OSError as error:
            self._report("checkpoint not removed", error=str(error))
            return f"the checkpoint of step {step} is written, but an older one could not be removed: {error}"
        return None

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint, if it exists, under another name, so that half of it is never taken for a checkpoint."""
        if path.exists():
            temporary = self._temporary()
            path.rename(temporary)
            _remove(temporary)

    def _placing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._writer is None else self._writer.placing()

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _temporary(self) -> Path:
        return self._folder / f".tmp-{os.getpid()}-{secrets.token_hex(4)}-{origin()}"


def load_weights(path: str | Path) -> dict[str, Any]:
    """The model's state by name, from a checkpoint's folder, or from the newest whole one of a run folder.

    Raises:
        CheckpointError: there is no checkpoint, or none is whole.
    """
    path = Path(path)
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {problem}: name a run folder, or a folder checkpoints/step-… in one")
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
    # The folder is listed again after each failure: a running job may have written a newer one, and removed this one.
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
        for newer, not_finite in untried[untried.index((step, path)) + 1 :]:
            names = ", ".join(map(short, Health.of(not_finite).first[:NAMED]))
            damage[not_finite] = f"{not_finite} holds weights or optimizer state that are NaN or infinite: {names}"
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
    """The checkpoints with their steps, whole or not, oldest first; before each the one that it has replaced."""
    folders = [(_CHECKPOINT.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir()]
    ordered = sorted((int(match[1]), match[2] is None, path) for match, path in folders if match)
    return [(step, path) for step, _, path in ordered]


def _healthiest(checkpoints: list[tuple[int, Path]]) -> tuple[int, Path]:
    """The checkpoint to go on from: the newest of those with the fewest tensors that are not finite."""
    return min(reversed(checkpoints), key=lambda checkpoint: Health.of(checkpoint[1]).tensors)


def _is_abandoned(temporary: Path) -> bool:
    """Whether no process writes into a temporary folder any more."""
    match = _TEMPORARY.fullmatch(temporary.name)
    if match is None:
        return False  # another program made it
    pid, mark = int(match[1]), match[2]
    if mark == origin():
        return pid == os.getpid() or not psutil.pid_exists(pid)
    last_change = max(path.stat().st_mtime for path in [temporary, *temporary.iterdir()])
    return time.time() - last_change > SILENT_S


def _make(folder: Path) -> str:
    folder.mkdir(parents=True)
    return str(folder)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
