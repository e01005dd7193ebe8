"""Weights from a checkpoint or from the main worker: those that every worker begins with, and those for inference."""

from __future__ import annotations

import warnings
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from unisono.checkpoint.folder import RunFolder
from unisono.checkpoint.store import Snapshot, load_weights
from unisono.errors import CheckpointError, UnisonoWarning
from unisono.train.config.run_config import RunConfig
from unisono.train.group.collectives import Change
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import OUTSIDE, Prepared, prefixed
from unisono.train.model.slices import slice_of
from unisono.train.model.tensors import Values, digest_tensors, set_all
from unisono.train.state.checkpoints import RunCheckpoints, require_same_job
from unisono.train.state.registered import kept, restoring
from unisono.train.state.sliced_state import sliced_state
from unisono.train.state.state import module_part
from unisono.train.state.trained import Trained


class FirstWeights:
    """The weights with which the training begins: those of the main worker, or of the newest checkpoint.

    Args:
        trained: the state of the run, which gets them.
        checkpoints: the checkpoints of the run so far.
        folder: the run folder.
        fingerprint: the fingerprint of job and machine, by name; that which checkpoints hold.
        config: the configuration of the run.
    """

    def __init__(
        self,
        trained: Trained,
        checkpoints: RunCheckpoints,
        folder: RunFolder,
        fingerprint: dict[str, Any],
        config: RunConfig,
    ) -> None:
        self._trained, self._checkpoints, self._folder, self._fingerprint = trained, checkpoints, folder, fingerprint
        self._allow_job_change = config.settings.checkpoints.allow_job_change
        self._measures = config.recording.curvature is not None

    def note(self, name: str, value: int) -> None:
        """The script has said something else on which bits depend: checkpoints tell it, and those of others differ."""
        self._fingerprint[name] = value

    def act(self, prepared: Prepared, workers: Workers, *, resumes: bool) -> Change[None]:
        """Find these weights. Collective.

        Args:
            prepared: models and optimizers.
            workers: the workers that begin with them.
            resumes: whether there may be a checkpoint to go on from.
        """
        shared = shared_weights(workers, prepared)
        found = self._checkpoints.newest(workers, partial(sliced_state, prepared, workers.devices)) if resumes else None
        if found is not None:
            where = f"the checkpoint of step {found.step} in {self._folder.path}"
            with restoring(found, "fingerprint of its job"):
                theirs = dict(kept(found, "about")["fingerprint"])
            require_same_job(self._fingerprint, theirs, where, allow=self._allow_job_change)

        def make() -> None:
            set_all(shared)
            self._trained.has_weights = True
            if found is not None and self._measures:
                self._trained.begin_at(found)
            elif found is not None:
                self._trained.resume_from(found, begins=True)

        return Change(make, partial(self._resumed, found, workers) if resumes else lambda: None)

    def _resumed(self, found: Snapshot | None, workers: Workers) -> None:
        if not workers.is_main:
            return
        if found is None:  # what an earlier try in this folder measured is measured again
            self._folder.metrics.truncate_after(-1)
            return
        step = self._trained.progress.position.step
        self._folder.metrics.truncate_after(step - 1)
        self._folder.journal("resumed", step=step, world_size=workers.world_size)
        behind = _behind(self._trained.progress.loop)
        print(f"unisono: resumes after step {step} from {self._folder.path}{behind}", flush=True)  # noqa: T201


def _behind(loops: int) -> str:
    match loops:
        case 0:
            return ""
        case 1:
            return ", after the script's first loop: it trains nothing more, also with more epochs"
    return f", after the script's first {loops} loops: they train nothing more, also with more epochs"


def shared_weights(workers: Workers, prepared: Prepared) -> Values:
    """The main worker's parameters and buffers, each with the tensor here that is to hold it. Collective.

    Nothing is set here. Warns where the workers' weights differ.
    """
    if workers.world_size == 1:
        return []
    digests = workers.gather_json(digest_tensors(prepared.tensors()))
    if workers.is_main and len(set(digests)) > 1:
        warnings.warn(
            "the workers built models with different weights, and now all have those of rank 0: the next run "
            "would start from others. Build the model after unisono.init, which seeds the random generators, or seed "
            "them before",
            UnisonoWarning,
            stacklevel=3,
        )
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    buffers = [place.tensor for place in prepared.buffers]
    for tensor in [*map(slice_of, prepared.tensors().values()), *prepared.parameters.values(), *buffers]:
        if not tensor.is_meta and tensor.data_ptr() not in shared and tensor.numel():
            value = tensor.detach().clone()
            workers.transport.broadcast(value, 0)
            shared[tensor.data_ptr()] = tensor, value
    return list(shared.values())


# Weights for inference, from a checkpoint.

M = TypeVar("M")


def load(model: M, path: str | PathLike[str]) -> M:
    """Put a checkpoint's weights into a model. What only optimizers held is left out.

    Args:
        model: built as in training: a module, or the list of them that ``run.prepare`` was given.
        path: a run folder (its newest whole checkpoint is taken) or one checkpoint's folder.

    Returns:
        the model.

    Raises:
        CheckpointError: there is no whole checkpoint, or it holds another model; names the difference.
    """
    modules: list[nn.Module] = list(model) if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]
    weights = load_weights(Path(path))
    try:
        for prefix, module in prefixed(modules):
            part = module_part(weights, prefix)
            for name in [name for name in part if OUTSIDE.fullmatch(name) and name not in module.state_dict()]:
                del part[name]
            module.load_state_dict(part)
    except RuntimeError as error:
        raise CheckpointError(f"{path} holds another model: {error}") from error
    return model
