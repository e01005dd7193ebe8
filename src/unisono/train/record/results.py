"""What ``result.json`` says of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from unisono.checkpoint.folder import RunFolder
from unisono.data.shards import ShardSource
from unisono.errors import Superseded
from unisono.exit_codes import PREEMPTED
from unisono.job import Job
from unisono.plan.batches import Batches
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.record.measurements import peak_memory, reduction_probe
from unisono.train.state.trained import Trained
from unisono.train.step.listeners import Listener


class Results(Listener):
    """Writes ``result.json``, however the run ends on this worker.

    Args:
        folder: of the run.
        trained: where it stands.
        membership: who trains.
        job: that is trained.
        device: of this worker.
        timeout_s: how long the run folder may take to be there again.
        measures: whether the file tells what a study wants to know.
    """

    def __init__(
        self,
        folder: RunFolder,
        trained: Trained,
        membership: Membership,
        job: Job,
        device: torch.device,
        timeout_s: float,
        *,
        measures: bool,
    ) -> None:
        self._folder, self._trained, self._membership = folder, trained, membership
        self._job, self._device, self._timeout_s, self._measures = job, device, timeout_s, measures
        self._batches: Batches | None = None  # of the newest loop
        self._started = perf_counter()

    def loop_begins(self, number: int, batches: Batches, source: ShardSource) -> None:
        """The file tells of the newest loop's data set."""
        self._batches = batches

    def conclude(self, weights: str, save: Callable[[], None], workers: Workers) -> None:
        """The job is done. Collective; repeated if a worker is lost in it: the next main worker writes again.

        Args:
            weights: their digest.
            save: writes the last checkpoint.
            workers: of this generation.
        """
        if workers.rank == 0:
            self._folder.ready(self._timeout_s)
        save()
        about: dict[str, Any] = {"workers": workers.gather_json(peak_memory(self._device))}
        if self._measures and self._trained.prepared is not None:
            parameters = self._trained.prepared.parameters.values()
            about["gradient_bytes"] = sum(each.numel() * each.itemsize for each in parameters)
            about["reduction"] = reduction_probe(workers, self._job.reduction, self._device)
        if workers.rank == 0:
            self._folder.journal("finished", step=self._trained.progress.position.step, weights_sha256=weights)
            self._folder.write_result(self._fields(weights_sha256=weights, **about))
        workers.barrier()

    def preempted(self) -> None:
        """The workers were asked to leave, and the job goes on when it is started again."""
        if self._membership.workers.rank != 0:
            return
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
        position, batches, joins = self._trained.progress.position, self._batches, self._membership.joins
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
