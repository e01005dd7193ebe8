"""The checkpoints of a run: where and when they are written, and what a run finds when it starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from unisono.checkpoint.checkpoint_store import CheckpointStore, load_weights
from unisono.checkpoint.folder import RunFolder, new_run_folder
from unisono.checkpoint.snapshot import Digests, Snapshot, as_snapshot, as_tree, read_some
from unisono.checkpoint.tensor_bytes import WHOLE, Share
from unisono.checkpoint.writer import Writer, WriterOrder
from unisono.errors import CheckpointError, JobError, JobMismatch
from unisono.failpoints import failpoint
from unisono.host.tracebacks import warn
from unisono.job import differences
from unisono.train.config.run_config import RunConfig
from unisono.train.group.collectives import Change, CollectiveCalls
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import OUTSIDE, Prepared, prefixed
from unisono.train.model.slices import slice_of
from unisono.train.model.tensors import Values, digest_tensors, set_all
from unisono.train.state.model_state import module_part
from unisono.train.state.registry import kept, restoring
from unisono.train.state.trained import Trained

Take = Callable[[Snapshot], Snapshot]
"""Leaves a device what it holds of a snapshot."""

M = TypeVar("M")


@dataclass(slots=True)
class RunCheckpoints:
    """The checkpoints of one run. Only the main worker has a store, on each of its devices.

    Attributes:
        store: the store in the run folder; None on workers that write none.
        every: steps between automatic checkpoints; None for none.
        requested: whether the script asked for one in this step.
        written: whether this run has written one, or goes on from one.
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
        """The duration of this worker's newest one; 0 if it has written none."""
        return 0.0 if self.store is None else self.store.seconds

    def due(self, step: int) -> bool:
        """Whether one is to be written now that ``step`` steps are committed."""
        return self.requested or (self.every is not None and step > 0 and step % self.every == 0)

    def save(
        self, snapshot: Snapshot, verified: Digests | None = None, share: Share = WHOLE, *, wait: bool = False
    ) -> bool:
        """Write one, in the background unless ``wait``.

        ``verified`` are digests on which all workers have agreed, if they have compared the state. Return whether it is
        on disk, as far as this worker knows.
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

    def newest(self, workers: Workers, cut: Take = lambda whole: whole) -> Snapshot | None:
        """The newest whole checkpoint, read by the main worker and handed to all."""

        def read(path: Path) -> Snapshot:
            return read_some(path, lambda whole: cut(as_snapshot(as_tree(whole))))

        path: str | None = None
        own: Snapshot | None = None
        if self.store is not None and workers.is_main:
            path, own = self.store.newest(lambda path: (str(path), read(path))) or (None, None)
        # Its other devices read what they hold by themselves: nobody needs room for all of it.
        path = workers.devices.first(path)
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
        """Note that this worker is the main worker now."""
        if self.store is None:
            self.store = self.open_store()

    def close(self) -> None:
        """Finish what is being written."""
        if self.store is not None:
            self.store.close()


def require_same_job(ours: dict[str, Any], theirs: dict[str, Any], where: str, *, allow: bool) -> list[str]:
    """Refuse to continue another job. Return the differences, if they are allowed.

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


class FirstWeights:
    """The weights with which the training begins: those of the main worker, or of the newest checkpoint."""

    def __init__(
        self,
        trained: Trained,
        checkpoints: RunCheckpoints,
        folder: RunFolder,
        fingerprint: dict[str, Any],
        config: RunConfig,
    ) -> None:
        self._trained, self._checkpoints, self._folder, self._fingerprint = trained, checkpoints, folder, fingerprint
        self._allow_job_change = config.settings.checkpoints.allow_job_change
        self._measures = config.recording.curvature is not None

    def note(self, name: str, value: int) -> None:
        """Note another value on which bits depend: checkpoints hold it, and other values are refused."""
        self._fingerprint[name] = value

    def act(self, prepared: Prepared, take: Take, workers: Workers, *, resumes: bool) -> Change[None]:
        """Find these weights. Collective."""
        shared = shared_weights(workers, prepared)
        snapshot = self._checkpoints.newest(workers, take) if resumes else None
        if snapshot is not None:
            where = f"the checkpoint of step {snapshot.step} in {self._folder.path}"
            with restoring(snapshot, "fingerprint of its job"):
                theirs = dict(kept(snapshot, "about")["fingerprint"])
            require_same_job(self._fingerprint, theirs, where, allow=self._allow_job_change)

        def make() -> None:
            set_all(shared)
            self._trained.has_weights = True
            if snapshot is not None and self._measures:
                self._trained.begin_at(snapshot)
            elif snapshot is not None:
                self._trained.resume_from(self._trained.registry.as_read(snapshot), begins=True)

        return Change(make, partial(self._resumed, snapshot, workers) if resumes else lambda: None)

    def _resumed(self, snapshot: Snapshot | None, workers: Workers) -> None:
        if not workers.is_main:
            return
        if snapshot is None:  # what an earlier try in this folder measured is measured again
            self._folder.metrics.truncate_after(-1)
            return
        step = self._trained.progress.position.step
        self._folder.metrics.truncate_after(step - 1)
        self._folder.journal("resumed", step=step, world_size=workers.world_size)
        loops, behind = self._trained.progress.loop, ""
        if loops:
            which = "first loop: it trains" if loops == 1 else f"first {loops} loops: they train"
            behind = f", after the script's {which} nothing more, also with more epochs"
        print(f"unisono: resumes after step {step} from {self._folder.path}{behind}", flush=True)  # noqa: T201


def shared_weights(workers: Workers, prepared: Prepared) -> Values:
    """The main worker's parameters and buffers, each with the tensor here that is to hold it. Collective.

    Nothing is set here. Warns where the workers' weights differ.
    """
    if workers.world_size == 1:
        return []
    digests = workers.gather_json(digest_tensors(prepared.tensors()))
    if workers.is_main and len(set(digests)) > 1:
        warn(
            "the workers built models with different weights, and now all have those of rank 0: the next run "
            "would start from others. Build the model after unisono.init, which seeds the random generators, or seed "
            "them before",
        )
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    buffers = [place.tensor for place in prepared.buffers]
    for tensor in [*map(slice_of, prepared.tensors().values()), *prepared.parameters.values(), *buffers]:
        if not tensor.is_meta and tensor.data_ptr() not in shared and tensor.numel():
            value = tensor.detach().clone()
            workers.transport.broadcast(value, 0)
            shared[tensor.data_ptr()] = tensor, value
    return list(shared.values())


def load(model: M, path: str | PathLike[str]) -> M:
    """Put a checkpoint's weights into a model. What only optimizers held is left out.

    Args:
        model: built as in training: a module, or the list of them that ``run.prepare`` was given.
        path: a run folder (its newest whole checkpoint is taken) or one checkpoint's folder.

    Returns:
        the model.

    Raises:
        CheckpointError: there is no whole checkpoint, or it holds another model; names the difference.
    """
    modules: list[nn.Module] = list(model) if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]
    weights = load_weights(Path(path))
    try:
        for prefix, module in prefixed(modules):
            part = module_part(weights, prefix)
            for name in [name for name in part if OUTSIDE.fullmatch(name) and name not in module.state_dict()]:
                del part[name]
            module.load_state_dict(part)
    except RuntimeError as error:
        raise CheckpointError(f"{path} holds another model: {error}") from error
    return model


# Which run folder the workers write into, and that nobody else does.


def agreed_folder(collectives: CollectiveCalls, membership: Membership, config: RunConfig) -> RunFolder:
    """This host's run folder. The others' may be another one: hosts of an elastic job need to share no files.

    Raises:
        JobError: another start has the folder, or it cannot be written to.
        JobMismatch: it holds another job.
    """
    recording = config.recording
    opened: RunFolder | None = None

    def opened_by_main(workers: Workers) -> str:
        nonlocal opened
        if workers.is_main and opened is None:  # not again where this is repeated, since a worker was lost
            script = Path(sys.argv[0] or "session").stem or "session"
            opened = RunFolder(recording.folder or new_run_folder(Path("runs"), script))
            try:
                if recording.term_in(opened.path) is None:
                    opened.hold()
            except OSError as error:
                why = f"{opened.path} cannot be a run folder: {error}; choose another one with run_dir="
                raise JobError(why) from error
            _keep_job(opened, config)
        path = workers.devices.first(None if opened is None else str(opened.path))
        return str(workers.broadcast(path))

    try:
        shared = collectives.together(opened_by_main)
        own = Path(shared) if recording.folder is None or not membership.is_elastic else recording.folder
        folder = opened or RunFolder(own)
        if str(folder.path) != shared:  # the main worker may be one of this host some time
            _keep_job(folder, config)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    term = recording.term_in(folder.path) or folder.term
    folder.written_by(
        Writer(folder.path, lambda: WriterOrder(term, membership.workers.generation.number), membership.away)
    )
    return folder


def _keep_job(folder: RunFolder, config: RunConfig) -> None:
    ours, theirs = asdict(config.job), folder.read_job()
    if theirs is not None:
        allow = config.settings.checkpoints.allow_job_change
        changed = require_same_job(ours, theirs, f"the run folder {folder.path}", allow=allow)
        if changed:
            folder.journal("job changed", differences=changed)
    folder.write_job(ours)
