"""The checkpoints of a run: when they are written, and what a run finds when it starts."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.folder import RunFolder, new_run_folder
from unisono.checkpoint.snapshot import Digests, read_some
from unisono.checkpoint.store import CheckpointStore, Snapshot
from unisono.checkpoint.tensors import WHOLE, Share
from unisono.checkpoint.writer import Writer, WriterOrder
from unisono.errors import CheckpointError, JobError, JobMismatch
from unisono.failpoints import failpoint
from unisono.job import differences
from unisono.received import short
from unisono.train.config.run_config import RunConfig
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers


@dataclass(slots=True)
class RunCheckpoints:
    """The checkpoints of one run. Only the main worker has a store, on each of its devices.

    Attributes:
        open_store: a function that opens the store in the run folder.
        store: the store in the run folder; None on workers that write none.
        every: steps between automatic checkpoints; None for none.
        requested: whether the script asked for one in this step.
    """

    open_store: Callable[[], CheckpointStore]
    store: CheckpointStore | None = None
    every: int | None = None
    requested: bool = False
    written: bool = False

    @property
    def in_use(self) -> bool:
        """Whether this run writes checkpoints at all, and so one at its end."""
        return self.requested or self.written or self.every is not None

    @property
    def seconds(self) -> float:
        """That this worker's newest one took; 0 if it has written none."""
        return 0.0 if self.store is None else self.store.seconds

    def due(self, step: int) -> bool:
        """Whether one is to be written now that ``step`` steps are committed."""
        return self.requested or (self.every is not None and step > 0 and step % self.every == 0)

    def save(
        self, snapshot: Snapshot, verified: Digests | None = None, share: Share = WHOLE, *, wait: bool = False
    ) -> bool:
        """Write one, in the background unless ``wait``.

        Args:
            snapshot: the state.
            verified: digests of it on which all workers have agreed, if they have compared it.
            share: this device's share of it.
            wait: until it is on disk.

        Returns:
            whether it is on disk, as far as this worker knows.
        """
        self.requested, self.written = False, True
        if self.store is None:
            return True
        failpoint("checkpoint captured")
        self.store.save(snapshot, verified, share)
        failpoint("checkpoint kept")
        if wait:
            self.store.wait()
        return not wait or self.holds(snapshot.step)

    def holds(self, step: int) -> bool:
        """Whether the one after so many steps is on disk, as far as this worker knows."""
        return self.store is None or step in self.store.steps()

    def newest(self, workers: Workers, cut: Callable[[Snapshot], Snapshot] = lambda whole: whole) -> Snapshot | None:
        """The newest whole checkpoint, read by the main worker and handed to all.

        Args:
            workers: the workers that get it.
            cut: a function that leaves a device what it holds of a snapshot.
        """

        def read(path: Path) -> Snapshot:
            return read_some(path, lambda whole: cut(as_snapshot(as_tree(whole))))

        store = self.store
        found: tuple[str, Snapshot] | None = None
        if store is not None and workers.is_main:
            found = store.newest(lambda path: (str(path), read(path)))
        # Its other devices read what they hold by themselves: nobody needs room for all of it.
        path, own = workers.devices.first(found and found[0]), found and found[1]
        if path is not None and own is None:
            own = read(Path(path))
        tree = workers.broadcast(None if own is None else as_tree(own))
        self.written = tree is not None  # a run that goes on from a checkpoint leaves one, too
        return None if tree is None else as_snapshot(tree)

    def discard_after(self, step: int) -> None:
        """Remove those of later steps: what is in them may be wrong."""
        if self.store is not None:
            self.store.discard_after(step)

    def begin_writing(self) -> None:
        """This is the main worker now."""
        if self.store is None:
            self.store = self.open_store()

    def close(self) -> None:
        """Finish what is being written."""
        if self.store is not None:
            self.store.close()


def as_tree(snapshot: Snapshot) -> list[Any]:
    """A snapshot as a tree that can be broadcast: the arguments of its type."""
    return [snapshot.step, snapshot.model, snapshot.optimizer, snapshot.state]


def as_snapshot(tree: Any) -> Snapshot:
    """The inverse of :func:`as_tree`, of what another worker has sent.

    Raises:
        CheckpointError: it is none.
    """
    match tree:
        case [int(step), dict(model), list(optimizer), dict(state)] if step >= 0:
            return Snapshot(step, model, optimizer, state)
    raise CheckpointError(f"{short(tree)} is no state of a run: another worker has sent it")


def require_same_job(ours: dict[str, Any], theirs: dict[str, Any], where: str, *, allow: bool) -> list[str]:
    """Refuse to continue another job.

    Returns:
        the differences, if they are allowed.

    Raises:
        JobMismatch: lists the differences and says how to accept them.
    """
    unequal = differences(ours, theirs)
    if unequal and not allow:
        listed = "\n  ".join(unequal)
        raise JobMismatch(
            f"{where} belongs to another job or machine (here: this run, there: what was found):\n  {listed}\n"
            f"Use another run folder, restore the settings, or accept that the bits will differ from an "
            f"undisturbed run: --allow-job-change, or unisono.init(checkpoints={{'allow_job_change': True}})"
        )
    return unequal


# Which run folder the workers write into, and that nobody else does.


def agreed_folder(collectives: CollectiveCalls, membership: Membership, config: RunConfig) -> RunFolder:
    """This host's run folder. The others' may be another one: hosts of an elastic job need to share no files.

    Args:
        collectives: the collective calls.
        membership: the members of the job.
        config: the configuration of the run, with the job and the folder that the script or its launcher names.

    Raises:
        JobError: another start has the folder, or it cannot be written to.
        JobMismatch: it holds another job.
    """
    opening, wanted = _Opening(config), config.recording.folder
    try:
        shared = collectives.together(opening)
        own = Path(shared) if wanted is None or not membership.is_elastic else wanted
        folder = opening.folder or RunFolder(own)
        if str(folder.path) != shared:  # the main worker may be one of this host some time
            _keep_job(folder, config)
    except BaseException:
        opening.close()
        raise
    term = config.recording.term_in(folder.path) or folder.term
    folder.written_by(
        Writer(folder.path, lambda: WriterOrder(term, membership.workers.generation.number), membership.away)
    )
    return folder


class _Opening:
    """The opening of the run folder by the main worker. Collective: repeated if a worker is lost in it.

    Attributes:
        folder: opened; None on other workers.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.folder: RunFolder | None = None

    def __call__(self, workers: Workers) -> str:
        if workers.is_main and self.folder is None:
            recording = self._config.recording
            self.folder = RunFolder(recording.folder or new_run_folder(Path("runs"), _script_stem()))
            if recording.term_in(self.folder.path) is None:
                _hold(self.folder)
            _keep_job(self.folder, self._config)
        own = workers.devices.first(None if self.folder is None else str(self.folder.path))
        return str(workers.broadcast(own))

    def close(self) -> None:
        """Let go of it."""
        if self.folder is not None:
            self.folder.close()


def _hold(folder: RunFolder) -> None:
    try:
        folder.hold()
    except OSError as error:
        raise JobError(f"{folder.path} cannot be a run folder: {error}; choose another one with run_dir=") from error


def _keep_job(folder: RunFolder, config: RunConfig) -> None:
    ours, theirs = asdict(config.job), folder.read_job()
    if theirs is not None:
        allow = config.settings.checkpoints.allow_job_change
        changed = require_same_job(ours, theirs, f"the run folder {folder.path}", allow=allow)
        if changed:
            folder.journal("job changed", differences=changed)
    folder.write_job(ours)


def _script_stem() -> str:
    return Path(sys.argv[0] or "session").stem or "session"
