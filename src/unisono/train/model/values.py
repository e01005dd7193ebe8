"""Tensors, and what they are to be."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.layout import form_of
from unisono.errors import CheckpointError

Values = Sequence[tuple[Tensor, Tensor]]
"""Tensors of a model or an optimizer, each with the value that it is to have."""


@torch.no_grad()
def set_all(values: Values) -> None:
    """Set every tensor to its value."""
    for tensor, value in values:
        tensor.copy_(value)


def set_like(tensors: Sequence[Tensor], found: Any, what: str) -> None:
    """Set tensors to those that were kept of them.

    Raises:
        CheckpointError: these are others; says what they are. Then nothing has changed.
    """
    if not isinstance(found, list | tuple) or not all(isinstance(value, Tensor) for value in found):
        raise CheckpointError(f"the {what} of the strategy that was kept is no list of tensors")
    if [form_of(value) for value in found] != [form_of(tensor) for tensor in tensors]:
        raise CheckpointError(f"the {what} of the strategy that was kept is of another model")
    set_all(list(zip(tensors, found, strict=True)))
