"""What ``result.json`` says of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

from unisono.checkpoint.folder import RunFolder
from unisono.errors import Superseded
from unisono.plan.batches import Batches
from unisono.train.group.membership import Membership
from unisono.train.group.signals import PREEMPTED
from unisono.train.state.trained import Trained


class Results:
    """Writes ``result.json``, however the run ends on this worker.

    Args:
        folder: of the run.
        trained: where it stands.
        membership: who trains.

    Attributes:
        batches: of the newest loop; None before the first.
    """

    def __init__(self, folder: RunFolder, trained: Trained, membership: Membership) -> None:
        self.batches: Batches | None = None
        self._folder, self._trained, self._membership = folder, trained, membership
        self._started = perf_counter()

    def finished(self, weights: str, about: Mapping[str, Any]) -> None:
        """The job is done; its weights have this digest."""
        self._folder.journal("finished", step=self._trained.progress.position.step, weights_sha256=weights)
        self._folder.write_result(self._fields(weights_sha256=weights, **about))

    def preempted(self) -> None:
        """The workers were asked to leave, and the job goes on when it is started again."""
        self._folder.journal("preempted", step=self._trained.progress.position.step)
        error = {"rank": None, "type": "Preempted", "message": "asked to leave: start the job again to go on"}
        self._folder.write_result(self._fields(exit_code=PREEMPTED, error=error))

    def failed(self, error: Mapping[str, Any]) -> None:
        """The script ends with an error, on whichever worker it began.

        Args:
            error: type, message and traceback, by name.
        """
        rank = -1 if self._membership.joins else self._membership.workers.rank
        with suppress(Superseded):  # the job goes on elsewhere
            self._folder.write_result(self._fields(exit_code=1, error={"rank": rank, **error}))

    def _fields(self, **fields: Any) -> dict[str, Any]:
        position, batches, joins = self._trained.progress.position, self.batches, self._membership.joins
        return {
            "weights_sha256": None,
            "steps": position.step,
            "samples": position.samples,
            "epoch_samples": None if batches is None else batches.epoch_samples,
            "dataset_samples": None if batches is None else batches.samples,
            "world_size": 0 if joins else self._membership.workers.world_size,
            "seconds": round(perf_counter() - self._started, 3),
            "exit_code": 0,
            "error": None,
            **self._folder.mended(),
            **fields,
        }
