"""The gradients of a model in tensor parallel: each device adds up those of its parts, of all shards of its worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.train.model.slices import held_whole, whole_gradient
from unisono.train.step.gradients import Gradients
from unisono.train.step.step import norm_one_by_one


class ParallelGradients(Gradients):
    """The gradients of what this device holds of a model, of which the devices compute each shard together.

    Of a parameter that torch holds as a ``DTensor`` the part of this device is taken; any other has the same gradient
    on all devices.
    """

    leaves_single = False

    def begin(self, step: int = 0) -> None:
        """Forget what was taken before; the shards of this worker follow."""
        super().begin(step)
        self._counts = True
        for parameter in self.parameters:
            _move(parameter)
            parameter.grad = None

    def open(self, *, last: bool) -> None:
        """The next shard begins."""
        super().open(last=last)
        self._counts = True

    def leave_out(self) -> None:
        """What comes of the passes under way does not count."""
        self._counts = False

    @torch.no_grad()
    def close(self) -> None:
        """The shard is done."""
        for parameter in self.parameters:
            _move(parameter)
            if not self._counts:
                parameter.grad = None
        super().close()

    def _hooked(self) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            (held_whole(parameter) if held_whole(parameter) is not None else parameter)  # type: ignore[union-attr]
            .register_post_accumulate_grad_hook(partial(self._arrive_held, number))
            for number, parameter in enumerate(self.parameters)
        ]

    @torch.no_grad()
    def _arrive_held(self, number: int, held: Tensor) -> None:
        if self._listens:
            parameter = self.parameters[number]
            _move(parameter)
            if not self._counts:
                parameter.grad = None
            self._arrive(number, parameter)


def _move(parameter: Tensor) -> None:
    """Have the gradient of what torch holds of a parameter with this device's part of it."""
    held: Any = held_whole(parameter)
    if held is None or held.grad is None:
        return
    gradient = held.grad
    if gradient.placements != held.placements:  # such as sums that are yet to be made over the devices
        gradient = gradient.redistribute(placements=held.placements)
    local = gradient.to_local()
    parameter.grad, held.grad = local.wait() if hasattr(local, "wait") else local, None


class TensorParallel:
    """What a model in tensor parallel computes otherwise than one that each device has for itself."""

    gradients = ParallelGradients  # of this device's parts

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together. Collective among the devices."""
        return norm_one_by_one(whole_gradient(each) for each in parameters if each.grad is not None)
