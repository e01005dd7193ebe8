"""Which run folder the workers write into, and that nobody else does."""

import sys
from pathlib import Path

from unisono.checkpoint.folder import RunFolder, new_run_folder
from unisono.checkpoint.writer import Turn, Writer
from unisono.errors import JobError
from unisono.job import Job
from unisono.train.config.settings import Settings
from unisono.train.group.acts import Acts
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.state.checkpoints import require_same_job


def agreed_folder(acts: Acts, membership: Membership, wanted: Path | None, job: Job, settings: Settings) -> RunFolder:
    """This host's run folder. The others' may be another one: hosts of an elastic job need to share no files.

    Args:
        acts: the collective calls.
        membership: who trains.
        wanted: by the script or its launcher; None for a new one.
        job: that is trained.
        settings: from the environment.

    Raises:
        JobError: another start has the folder, or it cannot be written to.
        JobMismatch: it holds another job.
    """
    opening = _Opening(wanted, job, settings)
    try:
        shared = acts.together(opening)
        own = Path(shared) if wanted is None or not membership.is_elastic else wanted
        folder = opening.folder or RunFolder(own)
        if str(folder.path) != shared:  # the main worker may be one of this host some time
            _keep_job(folder, job, settings)
    except BaseException:
        opening.close()
        raise
    term = settings.term if settings.term and _is_held_by_launcher(folder.path, settings) else folder.term
    folder.written_by(Writer(folder.path, lambda: Turn(term, membership.workers.generation.number), membership.away))
    return folder


class _Opening:
    """What the main worker does with the folder, and tells the others. An act: repeated if a worker is lost in it.

    Attributes:
        folder: opened; None on other workers.
    """

    def __init__(self, wanted: Path | None, job: Job, settings: Settings) -> None:
        self._wanted, self._job, self._settings = wanted, job, settings
        self.folder: RunFolder | None = None

    def __call__(self, workers: Workers) -> str:
        if workers.rank == 0 and self.folder is None:
            self.folder = RunFolder(self._wanted or new_run_folder(Path("runs"), _script_stem()))
            if not _is_held_by_launcher(self.folder.path, self._settings):
                _hold(self.folder)
            _keep_job(self.folder, self._job, self._settings)
        return str(workers.broadcast(None if self.folder is None else str(self.folder.path)))

    def close(self) -> None:
        """Let go of it."""
        if self.folder is not None:
            self.folder.close()


def _is_held_by_launcher(path: Path, settings: Settings) -> bool:
    if settings.term is None or settings.run_dir is None:
        return False
    launched = settings.run_dir.absolute()
    return path == launched or launched in path.parents


def _hold(folder: RunFolder) -> None:
    try:
        folder.hold()
    except OSError as error:
        raise JobError(f"{folder.path} cannot be a run folder: {error}; choose another one with run_dir=") from error


def _keep_job(folder: RunFolder, job: Job, settings: Settings) -> None:
    ours, theirs = job.model_dump(mode="json"), folder.read_job()
    if theirs is not None:
        changed = require_same_job(ours, theirs, f"the run folder {folder.path}", allow=settings.allow_job_change)
        if changed:
            folder.journal("job changed", differences=changed)
    folder.write_job(ours)


def _script_stem() -> str:
    return Path(sys.argv[0] or "session").stem or "session"
