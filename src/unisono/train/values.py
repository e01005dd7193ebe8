"""Tensors, and what they are to be."""

from collections.abc import Sequence

import torch
from torch import Tensor

Values = Sequence[tuple[Tensor, Tensor]]
"""Tensors of a model or an optimizer, each with the value that it is to have."""


@torch.no_grad()
def set_all(values: Values) -> None:
    """Set every tensor to its value."""
    for tensor, value in values:
        tensor.copy_(value)
