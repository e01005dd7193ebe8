"""What of a ``Trainer`` cannot be kept exact, and is refused with the cure; and what a run says in arguments."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from unisono.errors import DataError, JobError
from unisono.integrations.refused import refused
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

    world_size = 1  # as far as Transformers is concerned

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


def require_arguments(args: Any) -> None:
    """Refuse arguments by which a training could not be distributed, or would have other bits on other workers.

    Raises:
        JobError: one of them; says what to do.
    """
    state = getattr(args, "distributed_state", None)
    if state is not None and state.num_processes > 1:
        raise JobError(refused("transformers.process-group", count=state.num_processes))
    for setting, cure in _refused(args):
        raise JobError(f"{setting}: {cure}")


def require_map_style(dataset: Any) -> None:
    """Refuse a training data set that is a stream.

    Raises:
        DataError: it is one; says what to do.
    """
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"the training data set is a {type(dataset).__name__}, which is read from front to back, and samples are "
            f"distributed among workers by their numbers: give a map-style one; a finite stream becomes one with "
            f"list(stream) or datasets.Dataset.from_generator"
        )


def _refused(args: Any) -> Iterator[tuple[str, str]]:
    shares = "Unisono distributes the work itself, and every worker has the whole model: leave it out"
    if args.deepspeed:
        yield "deepspeed", shares
    if args.fsdp:
        yield "fsdp", shares
    if getattr(args, "parallelism_config", None) is not None:
        yield "parallelism_config", shares
    if args.fp16_full_eval or args.bf16_full_eval:
        yield "full evaluation in half precision", "it rounds the weights for good; use bf16=True or fp16=True instead"
    if args.torch_compile:
        yield "torch_compile=True", "compiled steps have bits that depend on the machine's compiler; leave it out"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True", "the batch is part of the job; unisono batch-size finds the largest"
    if getattr(args, "enable_jit_checkpoint", False):
        yield "enable_jit_checkpoint=True", "a run checkpoints by itself when it is asked to leave; leave it out"
    if args.batch_eval_metrics:
        yield "batch_eval_metrics=True", "metrics are computed on all rows in order; leave it out"
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        yield "train_sampling_strategy='batch_rebalance'", "it distributes batches by ranks; use 'group_by_length'"
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        yield f"optim={name!r}", "it updates weights in the middle of the backward pass; use another one"
