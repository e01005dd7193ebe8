"""Weights and samples that need no random numbers, which would be other ones on each thread of a test."""

from __future__ import annotations

import torch
from torch import nn


def waved(model: nn.Module, height: float = 1.0) -> None:
    """Set each parameter to pieces of a sine wave, another one for each.

    Args:
        model: the model.
        height: the largest weight.
    """
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(torch.linspace(-1, 1, weight.numel()).add(number).sin().view(weight.shape) * height)
