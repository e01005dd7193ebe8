"""torch's own profiler, in some steps of a worker."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from unisono.spans import CLOCK_MARK, FOLDER
from unisono.train.step.listeners import Listener
from unisono.train.step.step import Step

if TYPE_CHECKING:
    from torch.profiler import profile


class TorchProfile(Listener):
    """Writes ``timeline/<worker>.torch.json``, a Chrome trace of torch's operators and kernels. It slows steps down.

    Args:
        run_dir: the run folder.
        worker: this worker's id.
        steps: the steps to profile; those that this worker does not compute are left out.
    """

    def __init__(self, run_dir: Path, worker: str, steps: range) -> None:
        self._path, self._steps = run_dir / FOLDER / f"{worker}.torch.json", steps
        self._profile: profile | None = None

    def step_begins(self, step: Step) -> None:
        """Begin with the first of the steps, or with the first one that this worker takes part in."""
        if step.number not in self._steps or self._profile is not None:
            return
        from torch.profiler import profile, record_function

        self._profile = profile()
        self._profile.start()
        with record_function(f"{CLOCK_MARK}{round(perf_counter() * 1e9)}"):
            pass

    def step_ends(self, step: Step, after: int) -> None:
        """Write it when the last one is over."""
        if after >= self._steps.stop:
            self.close()

    def close(self) -> None:
        """Write what there is."""
        found, self._profile = self._profile, None
        if found is not None:
            found.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(self._path))
