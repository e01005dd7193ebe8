"""Weights for inference, from a checkpoint."""

from os import PathLike
from pathlib import Path
from typing import TypeVar

from torch import nn

from unisono.checkpoint.store import load_weights
from unisono.errors import CheckpointError
from unisono.train.model.prepared import prefixed
from unisono.train.state.state import module_part

M = TypeVar("M")


def load(model: M, path: str | PathLike[str]) -> M:
    """Put a checkpoint's weights into a model.

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
            module.load_state_dict(module_part(weights, prefix))
    except RuntimeError as error:
        raise CheckpointError(f"{path} holds another model: {error}") from error
    return model
