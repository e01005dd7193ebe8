"""The records of an accelerator: prints, trackers and saves, by the main worker alone, and once for each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

from accelerate import Accelerator as Original

from unisono.data.generators import generators_kept
from unisono.integrations.accelerate.evaluation_loop import Evaluations
from unisono.train.run import Run
from unisono.train.script_loop import ScriptLoop


class Saves:
    """The number of states saved under numbers as names, in checkpoints: a new main worker counts on.

    ``settings`` are accelerate's own, which count them.
    """

    def __init__(self, settings: Any) -> None:
        self._settings, self._first = settings, settings.iteration

    def state_dict(self) -> dict[str, int]:
        """The number of the next one."""
        return {"iteration": self._settings.iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on from there."""
        self._settings.iteration = state["iteration"]

    def remove_repeated(self, folder: Path, *, has_begun: bool) -> None:
        """Remove a state that this job has saved under the next number: it has gone back to before that.

        ``folder`` has all such states; ``has_begun`` says that the job is known to have saved there.
        """
        if has_begun or self._settings.iteration > self._first:
            rmtree(folder / f"checkpoint_{self._settings.iteration}", ignore_errors=True)

    def count(self) -> None:
        """Count a state that another worker saves."""
        self._settings.iteration += 1


class RecordingAccelerator(Original):  # type: ignore[misc]  # accelerate is not looked into by mypy
    """The part of an accelerator that writes.

    A run that resumes runs the script from its first line. What the script prints, tracks and saves before it is where
    the run goes on was written the time before, and is not written again.
    """

    run: Run
    _loop: ScriptLoop
    _evaluations: Evaluations
    _saves: Saves
    _begin_tracking: Callable[[], None] | None = None

    def _begin(self) -> None:
        """Every worker gets the same weights."""
        raise NotImplementedError

    @property
    def is_catching_up(self) -> bool:
        """Whether the run resumes further on in the script than it is now."""
        trained = self.run.inside.trained
        if trained.restored is None:
            return False
        progress = trained.progress
        return trained.loops < progress.loop + (progress.reading is not None)

    @property
    def _writes(self) -> bool:
        self._evaluations.require_whole()
        return bool(self.run.is_main and self._loop.is_last and not self.is_catching_up)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main worker; in the body of a training loop in the last turn of a step."""
        if self._writes:
            print(*args, **kwargs)  # noqa: T201 (what it is for)

    # -- trackers --------------------------------------------------------------------------------------------

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Begin to track on the main worker; on another one as soon as it is the main worker, and logs."""
        self._begin_tracking = lambda: Original.init_trackers(self, project_name, config, init_kwargs or {})
        if self.run.is_main:
            self._track()

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log values with the trackers; in the body of a training loop in the last turn of a step."""
        if self._writes:
            self._track()
            super().log(values, step, log_kwargs or {})

    def _track(self) -> None:
        begin, self._begin_tracking = self._begin_tracking, None
        if begin is not None:
            begin()

    # -- files -----------------------------------------------------------------------------------------------

    def save_model(self, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model's weights on the main worker."""
        if self._loop.is_last:
            self._loop.settle("accelerator.save_model")
            self._begin()
            if self._writes:
                super().save_model(model, save_directory, *args, **kwargs)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save weights, optimizers and schedulers on the main worker, in accelerate's format.

        In the body of a training loop it acts in the last turn of a step, behind ``optimizer.step``.
        """
        if not self._loop.is_last:
            return output_dir
        self._loop.settle("accelerator.save_state")
        self._begin()
        if not self._writes:
            self._saves.count()
            return output_dir
        if self.project_configuration.automatic_checkpoint_naming:
            has_begun = self.run.inside.trained.original is not None
            self._saves.remove_repeated(Path(self.project_dir) / "checkpoints", has_begun=has_begun)
        return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load what ``save_state`` has saved, on every worker. A run that resumes has a newer state, and keeps that."""
        self._loop.settle("accelerator.load_state")
        self._begin()
        if self.run.inside.trained.restored is None:
            with generators_kept():
                super().load_state(input_dir, load_kwargs, **kwargs)
