"""What the body of a script's loop changes in a step, so that it can run once more from where the step began."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import JobError
from unisono.train.model.places import BufferPlace
from unisono.train.model.tensors import version_of
from unisono.train.state.trained import Trained

Values = list[tuple[Tensor, Tensor]]
"""Tensors, each with a value of its own memory."""


def _copies(tensors: Iterable[Tensor]) -> Values:
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


@torch.no_grad()
def _set(values: Values) -> None:
    if values:
        torch._foreach_copy_([tensor for tensor, _ in values], [value for _, value in values])


class HeldGradients:
    """The gradients that a body leaves for its next backward pass, since no optimizer has used them."""

    def __init__(self) -> None:
        self._held: Values = []
        self._base: Values = []
        self._shown: dict[int, tuple[Tensor, int]] = {}

    def show(self) -> None:
        """Have the body find them in its parameters, so that it can clear them."""
        self._shown = {id(parameter): (gradient, gradient._version) for parameter, gradient in self._held}
        for parameter, gradient in self._held:
            parameter.grad = gradient

    def hide(self, parameters: Iterable[Tensor]) -> bool:
        """Take from the parameters what the body has left of them. Return whether it has only cleared some."""
        present = ((parameter, parameter.grad) for parameter in parameters)
        self._base = [(parameter, gradient) for parameter, gradient in present if gradient is not None]
        for parameter, _ in self._base:
            parameter.grad = None
        return all(self._is_left(parameter, gradient) for parameter, gradient in self._base)

    def _is_left(self, parameter: Tensor, gradient: Tensor) -> bool:
        shown, version = self._shown.get(id(parameter), (None, 0))
        return gradient is shown and (gradient._version == version or not bool(gradient.any()))

    def recall(self) -> None:
        """Go by what was left of them behind the backward pass before, and show nothing in this pass."""
        self._base, self._shown = self._held, {}

    @torch.no_grad()
    def add(self) -> None:
        """Add them to the mean gradient."""
        for parameter, gradient in self._base:
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)

    def keep(self, parameters: Iterable[Tensor], used: Collection[int]) -> None:
        """Keep the gradients of parameters, but for those that optimizers have used, by their ids."""
        present = ((parameter, parameter.grad) for parameter in parameters if id(parameter) not in used)
        self._held = [(parameter, gradient.clone()) for parameter, gradient in present if gradient is not None]

    def state(self, parameters: Iterable[Tensor]) -> list[Tensor | None]:
        """The gradient of each parameter; None where there is none."""
        held = {id(parameter): gradient for parameter, gradient in self._held}
        return [held.get(id(parameter)) for parameter in parameters] if held else []

    def load(self, state: Sequence[Tensor | None], parameters: Iterable[Tensor]) -> None:
        """Set them."""
        pairs = zip(parameters, state, strict=False)
        self._held = [(parameter, held.to(parameter.device)) for parameter, held in pairs if held is not None]


class StepWeights:
    """The weights with which a step began, and those behind each of its updates."""

    def __init__(self) -> None:
        self.has_changed = False
        self._first: Values | None = None
        self._updated: dict[int, list[Values]] = {}
        self._repeated: dict[int, int] = {}

    def begin(self) -> None:
        """Begin a step."""
        self.has_changed, self._first, self._updated = False, None, {}

    @property
    def is_kept(self) -> bool:
        """Whether what was changed can be changed again."""
        return self._first is not None or not self.has_changed

    def change(self, act: Callable[[], Any], number: int, changed: Iterable[Tensor], trained: Iterable[Tensor]) -> None:
        """Make an update of some weights behind the backward pass of a number.

        ``trained`` are all weights, if those around the update are to be kept; else nothing.
        """
        if not self.has_changed:
            self._first = _copies(trained) or None
        self.has_changed = True
        act()
        if self._first is not None:
            self._updated.setdefault(number, []).append(_copies(changed))

    def settle(self, number: int) -> None:
        """Note what else the body has changed of them behind such an update."""
        for tensor, value in self._updated[number][-1] if number in self._updated else ():
            value.copy_(tensor.detach())

    def rewind(self) -> None:
        """Set the weights as the step began."""
        self._repeated = {}
        _set(self._first or [])

    def repeat(self, number: int) -> None:
        """Set the weights as the next of the updates behind the backward pass of a number has left them."""
        made = self._updated.get(number, [])
        if (place := self._repeated.get(number, 0)) < len(made):
            _set(made[place])
        self._repeated[number] = place + 1


class StepBuffers:
    """The buffers with which a step began."""

    def __init__(self) -> None:
        self._places: Sequence[BufferPlace] = ()
        self._kept: list[Tensor] = []
        self._held: list[Tensor] = []
        self._at_first = list[tuple[int, int]]()
        self._set = list[tuple[int, int]]()

    def begin(self, places: Sequence[BufferPlace]) -> None:
        """Begin a step, and keep the buffers; only those that were written since the last one are copied."""
        present, before = _marks(places), dict(zip(self._at_first, self._kept, strict=True))
        self._kept = [
            before[mark] if mark in before else place.tensor.detach().clone()
            for place, mark in zip(places, present, strict=True)
        ]
        self._places, self._at_first, self._set = places, present, []
        self._held = [place.tensor for place in places]  # or another tensor might get the number of one that is gone

    def restore(self) -> None:
        """Set the buffers as the step began."""
        for place, value in zip(self._places, self._kept, strict=True):
            place.set(value)

    def mark(self) -> None:
        """Note that the engine has set the buffers for the next shard."""
        self._set = _marks(self._places)

    @property
    def are_written(self) -> bool:
        """Whether the body has written to them since."""
        return bool(self._set) and self._set != _marks(self._places)


def _marks(places: Sequence[BufferPlace]) -> list[tuple[int, int]]:
    return [(id(place.tensor), version_of(place.tensor, place.name)) for place in places]


class SpareTurn:
    """What a turn finds that counts for nothing, and only updates: it must not change buffers and the mean gradient."""

    def __init__(self, places: Sequence[BufferPlace], parameters: Sequence[Tensor]) -> None:
        self._buffers = [(place, place.tensor.detach().clone()) for place in places]
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def end_buffers(self) -> None:
        """Set buffers as they were."""
        for place, value in self._buffers:
            place.set(value)

    def end(self) -> None:
        """Set both as they were."""
        self.end_buffers()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


class SettingsWatch:
    """Finds settings that a body changes in several turns of a step: the number of turns depends on the workers."""

    def __init__(self, trained: Trained, refused: Callable[..., str]) -> None:
        self._trained, self._refused = trained, refused
        self._before: list[dict[str, Any]] = []
        self._has_changed = False

    def step_begins(self) -> None:
        """Begin a step: the body has made no turn of it."""
        self._has_changed = False

    def turn_begins(self) -> None:
        """Note that the body begins a turn."""
        self._before = self._present()

    def turn_ends(self) -> None:
        """The body has come to its end.

        Raises:
            JobError: it has changed settings, and has done so before in this step.
        """
        present = self._present()
        if present == self._before:
            return
        if self._has_changed:
            names = {
                name
                for group, other in zip(self._before, present, strict=False)
                for name in group
                if group[name] != other.get(name)
            }
            raise JobError(self._refused("settings-twice", names=", ".join(sorted(names))))
        self._has_changed = True

    def _present(self) -> list[dict[str, Any]]:
        return [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for optimizer in self._trained.require_prepared().optimizers
            for group in optimizer.param_groups
        ]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
