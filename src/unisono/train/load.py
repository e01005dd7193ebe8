"""Weights for inference, from a checkpoint."""

from os import PathLike
from pathlib import Path
from typing import TypeVar

from torch import nn

from unisono.checkpoint.store import load_weights
from unisono.errors import CheckpointError

M = TypeVar("M", bound=nn.Module)


def load(model: M, path: str | PathLike[str]) -> M:
    """Put a checkpoint's weights into a model.

    Args:
        model: built as in training.
        path: a run folder (its newest whole checkpoint is taken) or one checkpoint's folder.

    Returns:
        the model.

    Raises:
        CheckpointError: there is no whole checkpoint, or it holds another model; names the difference.
    """
    try:
        model.load_state_dict(load_weights(Path(path)))
    except RuntimeError as error:
        raise CheckpointError(f"{path} holds another model: {error}") from error
    return model
