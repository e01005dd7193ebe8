"""The update that a script makes by itself, from the step's gradient in ``parameter.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.layout import form_of
from unisono.errors import JobError, Unreadable
from unisono.received import value_of
from unisono.train.model.places import BufferPlace, Placed, set_places

Scaled = Callable[[Any], AbstractContextManager[Any]]
"""Given optimizers, changes their learning rates for a while."""


@dataclass(slots=True)
class OwnUpdate:
    """A call's update that the script makes by itself.

    Attributes:
        act: a function without arguments that makes the update.
        told: a function that gets the mean loss of the call before that.
        returned: the value that the function returned.

    Raises:
        JobError: there is nothing to call.
    """

    act: Callable[[], Any]
    told: Callable[[float], None]
    returned: Any = None

    def __post_init__(self) -> None:
        if not callable(self.act):
            raise JobError(
                f"step.run(update=…) got a {type(self.act).__name__}: it needs a function without arguments that makes "
                f"the update, for instance update=optimizer.step"
            )
        if iscoroutinefunction(self.act) or isgeneratorfunction(self.act) or isasyncgenfunction(self.act):
            raise JobError(
                "step.run(update=…) got a coroutine or a generator, of which a call makes nothing yet: give a function "
                "that makes the update, without async and yield"
            )

    def make(self, loss: float, optimizers: Sequence[Optimizer], scaled: Scaled) -> None:
        """Call the function.

        Args:
            loss: the mean loss of the call.
            optimizers: the optimizers of the call.
            scaled: a context manager that changes their learning rates while one of them makes its step.
        """
        self.told(loss)
        with _scaled_in_steps(optimizers, scaled):
            self.returned = self.act()


@contextmanager
def _scaled_in_steps(optimizers: Sequence[Optimizer], scaled: Scaled) -> Iterator[None]:
    # Not around all of it: schedulers that the script steps in it go on from the learning rates of its own.
    with ExitStack() as hooks:
        for optimizer in optimizers:
            step = hooks.enter_context(ExitStack())
            hooks.callback(optimizer.register_step_pre_hook(_entering(step, scaled, optimizer)).remove)
            hooks.callback(optimizer.register_step_post_hook(_leaving(step)).remove)
        yield


def _entering(step: ExitStack, scaled: Scaled, optimizer: Optimizer) -> Callable[..., None]:
    def enter(*_: Any) -> None:
        step.enter_context(scaled([optimizer]))

    return enter


def _leaving(step: ExitStack) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        step.close()

    return leave


@dataclass(slots=True)
class UpdateCause:
    """A copy of what an update was made from: the loss, the step's gradient, and the buffers that came with them.

    Attributes:
        loss: the mean loss of the call.
        gradients: the gradients of the parameters; None of those that no shard used.
        buffers: the buffers that changed, by their numbers.
    """

    loss: float = 0.0
    gradients: list[Tensor | None] = field(default_factory=list)
    buffers: list[tuple[int, Tensor]] = field(default_factory=list)
    _memory: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def keep(
        self, loss: float, parameters: Mapping[str, Tensor], places: Sequence[BufferPlace], buffers: Placed
    ) -> None:
        """Copy them, before the script changes any.

        Args:
            loss: the mean loss of the call.
            parameters: the parameters of the call by name, with their gradients.
            places: all buffers.
            buffers: the buffers that changed, and what they are now.
        """
        numbers = {id(place): number for number, place in enumerate(places)}
        self.loss = loss
        self.gradients = [self._copied(number, one.grad) for number, one in enumerate(parameters.values())]
        self.buffers = [(numbers[id(place)], value.clone()) for place, value in buffers]

    def let_go(self) -> None:
        """Hold no copy: it takes as much memory as the gradients."""
        self.gradients, self.buffers = [], []
        self._memory.clear()

    def tree(self) -> list[Any]:
        """All of it, to be broadcast."""
        return [self.loss, self.gradients, [list(each) for each in self.buffers]]

    @torch.no_grad()
    def set(self, parameters: Mapping[str, Tensor], places: Sequence[BufferPlace]) -> None:
        """Have parameters and buffers as they were when it was copied.

        Raises:
            Unreadable: it is of another model.
        """
        if len(self.gradients) != len(parameters):
            raise Unreadable(f"another worker gave {len(self.gradients)} gradients for {len(parameters)} parameters")
        for parameter, gradient in zip(parameters.values(), self.gradients, strict=True):
            parameter.grad = None if gradient is None else _like(parameter, gradient)
        set_places([(places[number], value) for number, value in self.buffers])

    @classmethod
    def of(cls, tree: Any, places: Sequence[BufferPlace]) -> UpdateCause:
        """The inverse of :meth:`tree`.

        Raises:
            Unreadable: it is none.
        """
        form = tuple[float, list[Tensor | None], list[tuple[int, Tensor]]]
        loss, gradients, buffers = value_of(form, tree, "the gradient that another worker gave")
        if not all(0 <= number < len(places) and places[number].fits(value) for number, value in buffers):
            raise Unreadable("another worker gave buffers that this one does not have")
        return cls(loss, gradients, buffers)

    def _copied(self, number: int, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        memory = self._memory.get(number)
        if memory is None or form_of(memory) != form_of(gradient):
            memory = self._memory[number] = torch.empty_like(gradient)
        return memory.copy_(gradient)


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    _require_form(parameter, gradient)
    return torch.empty_like(parameter).copy_(gradient)


def _require_form(tensor: Tensor, value: Tensor) -> None:
    if form_of(tensor) != form_of(value):
        raise Unreadable(f"another worker gave {form_of(value)} for {form_of(tensor)}")
