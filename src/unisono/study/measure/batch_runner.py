"""Trials of a batch, each started by this host's launcher."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.checkpoint.folder import RunFolder
from unisono.errors import DataError, LaunchError
from unisono.launch.ending.out_of_memory import ran_out_of_memory
from unisono.launch.ending.outcome import Outcome
from unisono.launch.ending.result import in_a_line, last_lines, open_folder
from unisono.launch.local import Launcher
from unisono.launch.settings import LaunchSettings
from unisono.launch.terminal.terminal import SilentTerminal
from unisono.study.measure.batch_search import Tried
from unisono.study.measure.batch_searching import failing_trial, finished_trial
from unisono.study.measure.measuring import Interrupted

OTHERS = ("UNISONO_STOP_AFTER_EPOCHS", "UNISONO_BATCH_SCALE", "UNISONO_BATCH_SCALE_WARMUP")
"""Variables of the shell that would change what is tried."""


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """Tries batches with this machine's launcher.

    Attributes:
        settings: of all trials.
        steps: of each.
        failed: where the run folder of a trial stays that failed for another reason than its memory.
    """

    settings: LaunchSettings
    steps: int
    failed: Path

    def attempt(self, batch: int, launcher: Launcher, folder: Path) -> Tried:
        """Try one. Main thread only.

        Args:
            batch: samples per worker.
            launcher: that all trials have in common.
            folder: for its run folder, which is removed.

        Raises:
            Interrupted: by a signal.
            JobError: the script takes no steps.
            LaunchError: it failed, and not for its memory; names its log.
        """
        place = folder / f"batch-{batch}"
        run_folder = open_folder(place, self.settings.script.stem)
        outcome = launcher.launch(self.told(batch), run_folder, SilentTerminal())
        if outcome.interrupted is not None:
            raise Interrupted(outcome.interrupted)
        silent = [each.rank for each in outcome.exits if each.failure is None]
        said = {rank: last_lines(run_folder.log_of(rank)) for rank in silent}
        peak = max((each.peak_mib or 0.0 for each in outcome.exits), default=0.0) or None
        if words := ran_out_of_memory(outcome, said):
            tried = failing_trial(place, batch, peak, words)
        elif outcome.exit_code != 0:
            shutil.rmtree(self.failed, ignore_errors=True)
            shutil.move(place, self.failed)
            raise LaunchError(failure_words(outcome, batch, self.settings.workers, RunFolder(self.failed)))
        else:
            tried = finished_trial(place, batch, peak, self.settings.memory_limit_mib)
        shutil.rmtree(place, ignore_errors=True)
        return tried

    def told(self, batch: int) -> LaunchSettings:
        """How to start a trial."""
        variables = {
            "UNISONO_STUDY": "1",
            "UNISONO_BATCH_SIZE": str(batch * self.settings.workers),
            "UNISONO_STOP_AFTER": str(self.steps),
            **{name: "" for name in OTHERS if os.environ.get(name)},
        }
        return replace(self.settings, extra_environment=variables)


def failure_words(outcome: Outcome, batch: int, workers: int, folder: RunFolder) -> str:
    """What to say when a trial failed for another reason than its memory.

    Args:
        outcome: of its launch.
        batch: samples per worker.
        workers: how many.
        folder: its run folder.
    """
    samples = f"{batch} per worker" if workers > 1 else f"{batch}"
    words, log = in_a_line(outcome, folder)
    failure = outcome.cause and outcome.cause.failure
    # The first batch is the only one that may be larger than the data set.
    hint = "; the search may begin with less: --from" if failure and failure.type.endswith(DataError.__name__) else ""
    return f"with a batch of {samples} the script fails, and not for its memory: {words}{hint} (log: {log})"
