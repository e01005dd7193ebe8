"""Training arguments on a worker of a run: who saves and logs, and on which device."""

from __future__ import annotations

import copyreg
from typing import Any

import torch

from unisono.train.run import Run


class _OnWorker:
    """What training arguments say while a run decides it. Transformers sees one process: the run has the others."""

    _run: Run
    _kind: type

    @property
    def process_index(self) -> int:
        """The worker's rank, by which Transformers decides who saves: 0 for one at a time, also after a loss."""
        return self._run.rank

    local_process_index = process_index

    @property
    def world_size(self) -> int:
        """One, as far as Transformers is concerned."""
        return 1

    @property
    def n_gpu(self) -> int:
        """One device for each worker, and none of torch's DataParallel."""
        return min(1, int(self._run.device.type != "cpu"))

    @property
    def device(self) -> torch.device:
        """The worker's device."""
        return self._run.device

    def __reduce_ex__(self, protocol: Any) -> Any:
        # In files they are what they were, for whoever has no Unisono.
        return copyreg._reconstructor, (self._kind, object, None), self.__dict__  # type: ignore[attr-defined]


def host(args: Any, run: Run) -> None:
    """Have training arguments ask the run who this worker is. They stay the script's own object.

    Args:
        args: the arguments, of any class that derives from ``TrainingArguments``.
        run: the run.
    """
    kind = getattr(args, "_kind", type(args))
    args.__class__ = type(kind.__name__, (_OnWorker, kind), {"_run": run, "_kind": kind, "__module__": kind.__module__})
