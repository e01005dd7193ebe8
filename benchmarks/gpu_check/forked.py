"""Forks of a program that has loaded torch."""

import multiprocessing
from multiprocessing.context import ForkContext

import torch


def loaded_context() -> ForkContext:
    """What forks this process, once it has loaded what they need; it may not have used the device."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # the first optimizer has torch load 800 modules
    return multiprocessing.get_context("fork")
