"""Gradients with tensor parallelism: each device adds up those of its parts over all shards of its worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.errors import ModelError
from unisono.train.model.slices import held_whole, slice_of, whole_gradient
from unisono.train.step.gradients import Gradients
from unisono.train.step.placement import SpreadPlacement
from unisono.train.step.step import norm_one_by_one
from unisono.train.step.summed_gradients import SummedGradients


class ParallelGradients(SummedGradients):
    """The gradients of this device's parts of a model whose devices compute each shard together.

    If torch holds a parameter as a ``DTensor``, the part of this device is taken; any other parameter has the same
    gradient on all devices.
    """

    def begin(self, step: int = 0) -> None:
        """Forget the last step; the shards of this worker follow."""
        super().begin(step)
        self._counts = True
        for parameter in self.parameters:
            _move(parameter)
            parameter.grad = None

    def open(self, *, last: bool) -> None:
        """Begin the next shard."""
        super().open(last=last)
        self._counts = True

    def leave_out(self) -> None:
        """Ignore the gradients of the passes under way."""
        self._counts = False

    @torch.no_grad()
    def close(self) -> None:
        """End the shard."""
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
    """Move the gradient from torch's own object for a parameter to this device's part of it."""
    held: Any = held_whole(parameter)
    if held is None or held.grad is None:
        return
    gradient = held.grad
    if gradient.placements != held.placements:  # it may be a sum over the devices that is yet to be made, for instance
        gradient = gradient.redistribute(placements=held.placements)
    local = gradient.to_local()
    parameter.grad, held.grad = local.wait() if hasattr(local, "wait") else local, None


class TensorParallel(SpreadPlacement):
    """A model in tensor parallelism: all devices compute each shard, each with its parts of layers."""

    @property
    def gradients(self) -> Callable[..., Gradients]:
        """The class of gradients for parts of parameters."""
        return ParallelGradients

    def require(self, state: Mapping[str, Any] | None) -> None:
        """Refuse parameters that belong to no module: their optimizer was made before ``run.parallelize``."""
        prepared = self._prepared
        members = {id(slice_of(tensor)) for module in prepared.modules for tensor in module.parameters()}
        if stranger := next((name for name, tensor in prepared.parameters.items() if id(tensor) not in members), ""):
            raise ModelError(
                f"{stranger} belongs to no module: make the optimizer after run.parallelize, which puts other "
                f"parameters into the layers"
            )

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients, which are made whole one after the other."""
        return norm_one_by_one(whole_gradient(parameter) for parameter in parameters if parameter.grad is not None)
