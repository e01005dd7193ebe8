"""What of accelerate cannot be kept exact, and is refused with the cure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from accelerate.state import PartialState

from unisono.errors import JobError

_OTHERS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
    "parallelism_config": "other parallelism",
}
_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "other parallelism",
}


def require_kept(said: Mapping[str, Any]) -> None:
    """Refuse what an accelerator is made with, if it cannot train on several workers as on one.

    Args:
        said: arguments of accelerate's own ``Accelerator`` by name.

    Raises:
        JobError: there is such a thing; says what to do.
    """
    for name, what in _OTHERS.items():
        if said.get(name) is not None:
            _refuse_split(f"{name}=…", what)
    for name, what in _VARIABLES.items():
        if os.environ.get(name, "").lower() in ("1", "true", "yes"):
            _refuse_split(f"{name}={os.environ[name]}", what)
    if precision_of(said) == "fp8":
        raise JobError(
            "mixed_precision='fp8' scales weights by what each process has seen: use mixed_precision='bf16' or 'fp16'"
        )
    if said.get("dynamo_backend") is not None or said.get("dynamo_plugin") is not None:
        raise JobError("dynamo_backend=…: compiled models have other bits; leave it out")
    if said.get("step_scheduler_with_optimizer") is False:
        raise JobError(
            "step_scheduler_with_optimizer=False: a scheduler would step once for each shard, of which workers have "
            "different numbers; leave it out, and step schedulers after optimizer.step()"
        )
    loaders = said.get("dataloader_config")
    if loaders is not None and loaders.dispatch_batches:
        raise JobError(
            "dispatch_batches=True has the main process load for all, and the run distributes samples before they are "
            "loaded: leave it out"
        )
    if loaders is not None and loaders.use_stateful_dataloader:
        raise JobError("use_stateful_dataloader=True: the run's checkpoints know where a loader stands; leave it out")
    plugin = said.get("gradient_accumulation_plugin")
    if plugin is not None and not plugin.sync_with_dataloader:
        raise JobError("sync_with_dataloader=False accumulates over the end of an epoch: leave it out")
    if PartialState._shared_state.get("num_processes", 1) > 1:
        raise JobError(
            "accelerate has formed a process group of its own already: make unisono.accelerate.Accelerator() before "
            "anything that uses accelerate's PartialState"
        )


def precision_of(said: Mapping[str, Any]) -> str:
    """The precision that an accelerator is made with."""
    return str(said.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))


def require_own_folder(project: str | os.PathLike[str] | None, run: Path) -> None:
    """Refuse to save states among the run's checkpoints.

    Args:
        project: accelerate's project folder.
        run: the run folder.

    Raises:
        JobError: they are one.
    """
    if project is not None and Path(project).resolve() == run.resolve():
        raise JobError(
            f"project_dir is the run folder, {run}: both have a folder of checkpoints, and accelerate would remove the "
            f"run's with total_limit. Name another one"
        )


def _refuse_split(where: str, what: str) -> NoReturn:
    raise JobError(
        f"{where}: {what} distributes a model among processes by itself, and Unisono has the whole model on each "
        f"worker: leave it out, every worker has the whole model"
    )
