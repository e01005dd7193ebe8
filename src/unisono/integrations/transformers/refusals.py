"""What of a ``Trainer`` cannot be kept exact, and is refused with the cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from unisono.errors import DataError, JobError


def require_arguments(args: Any) -> None:
    """Refuse arguments by which a training could not be distributed, or would have other bits on other workers.

    Raises:
        JobError: one of them; says what to do.
    """
    state = getattr(args, "distributed_state", None)
    if state is not None and state.num_processes > 1:
        raise JobError(
            f"the TrainingArguments have formed a process group of {state.num_processes} by themselves, from the "
            f"variables of the launcher: call run = unisono.init() before they are made, which hides those; or start "
            f"the script with unisono run"
        )
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
