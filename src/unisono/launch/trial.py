"""Trials: jobs that a command runs on this host without showing their output, to read their results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unisono.checkpoint.folder import RunFolder
from unisono.launch.local import Launcher, launch
from unisono.launch.outcome import Outcome, last_lines, open_folder
from unisono.launch.settings import LaunchSettings
from unisono.launch.terminal import SilentTerminal


@dataclass(frozen=True, slots=True)
class Trial:
    """A job that has ended, well or not."""

    outcome: Outcome
    folder: RunFolder

    @classmethod
    def run(cls, settings: LaunchSettings, folder: Path, launcher: Launcher | None = None) -> Trial:
        """Run a job with checked settings to its end, by default with a launcher of its own. Main thread only.

        Raises:
            JobError: the folder cannot be used.
            LaunchError: a worker could not be started.
        """
        run_folder = open_folder(folder, settings.script.stem)
        start = launch if launcher is None else launcher.launch
        return cls(start(settings, run_folder, SilentTerminal()), run_folder)

    @property
    def failed(self) -> bool:
        """Whether the script did not end well."""
        return self.outcome.exit_code != 0

    @property
    def error(self) -> str:
        """What went wrong, in a line."""
        summary, cause = self.outcome.summary(), self.outcome.cause
        if cause is None or cause.failure is not None:
            return summary
        return "; ".join([summary, *last_lines(self.log, 1)])  # without an exception, its last line may say why

    @property
    def log(self) -> Path:
        """The file or folder that says more about what went wrong."""
        cause = self.outcome.cause
        return self.folder.logs if cause is None else self.folder.log_of(cause.rank)
