"""Places of tensors that shards change: buffers of modules, and what else a run is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from unisono.checkpoint.layout import KEPT, form_of
from unisono.errors import ModelError
from unisono.received import short
from unisono.train.model.tensors import set_all, version_of

Rule = Literal["mean", "first", "sum", "max", "min", "cat"]
"""What becomes of a tensor that each shard has changed by itself."""

RULES: tuple[str, ...] = get_args(Rule)

FRESH = ("sum", "cat")
"""Rules by which each shard begins with nothing, and what all of them make is added to what was there."""


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """The place that holds a buffer, or another tensor that shards change: assigning to it may put another one there.

    Attributes:
        registry: the attributes or buffers of an object, by name.
        key: its name among them.
        name: its name for people, and in checkpoints.
        chosen: the rule by which it is combined; None for the one that follows from its dtype.
    """

    registry: dict[str, Any]
    key: str
    name: str
    chosen: Rule | None = None

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now.

        Raises:
            ModelError: there is none any more; names the place.
        """
        held = self.registry.get(self.key)
        found: Tensor = held if isinstance(held, Tensor) else self._held()
        return found

    @property
    def is_held(self) -> bool:
        """Whether there is one."""
        return isinstance(self.registry.get(self.key), Tensor)

    @property
    def rule(self) -> Rule:
        """The rule by which it is combined."""
        return self.chosen or ("mean" if self.tensor.is_floating_point() else "first")

    @property
    def form(self) -> list[Any]:
        """Dtype and shape, as JSON values; the length of what grows is left out."""
        return self._form_of(self.tensor)

    def fits(self, value: Tensor, present: Tensor | None = None) -> bool:
        """Whether a tensor may come to be here.

        Args:
            value: the tensor.
            present: what it is to follow; the tensor that is there now by default.
        """
        present = self.tensor if present is None else present
        return value.dim() == present.dim() and self._form_of(value) == self._form_of(present)

    def put(self, tensor: Tensor) -> None:
        """Have a tensor here, in place of the one that was."""
        self.registry[self.key] = tensor

    def set(self, value: Tensor) -> None:
        """Set the tensor that is here to a value."""
        set_all([(self.tensor, value)])

    def move(self, device: torch.device) -> None:
        """Have its tensor, which others may hold as well, on a device from now on."""
        if (tensor := self.tensor).device != device:
            tensor.data = tensor.data.to(device)

    def _held(self) -> Any:
        """What is in the registry."""
        if not self.is_held:
            raise ModelError(
                f"the {self.name} is {short(self.registry.get(self.key))} now, and was a tensor, or a list of tensors, "
                f"when run.prepare was given it: assign what it was, for instance torch.tensor(…)"
            )
        return self.registry[self.key]

    def _form_of(self, tensor: Tensor) -> list[Any]:
        dtype, shape = form_of(tensor)
        return [dtype, shape[1:] if self.rule == "cat" else shape]


Placed = Sequence[tuple[BufferPlace, Tensor]]
"""Places, each with the value that its tensor is to have."""


def set_places(values: Placed) -> None:
    """Set the tensor of each place to its value."""
    for place, value in values:
        place.set(value)


def places_of(prefix: str, root: nn.Module) -> Iterator[BufferPlace]:
    """The places of a module's buffers."""
    for path, module in root.named_modules(prefix=prefix.rstrip(".")):
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield BufferPlace(module._buffers, key, f"{path}.{key}" if path else key)


MOST_DIMENSIONS = 16


@dataclass(slots=True)
class _Joined:
    """A list as one tensor, and what it was made of."""

    of: list[tuple[Tensor, int]]
    tensor: Tensor

    def is_of(self, listed: list[Tensor]) -> bool:
        return len(listed) == len(self.of) and all(
            one is other and one._version == version for one, (other, version) in zip(listed, self.of, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ListedPlace(BufferPlace):
    """The place that holds a list of tensors, whose tensor is all of them, one behind the other.

    An empty list is a tensor of no elements, whose dtype and shape say nothing. After a step the list has one tensor.
    """

    _nothing: Tensor = field(default_factory=lambda: torch.empty(0))
    _joined: _Joined = field(default_factory=lambda: _Joined([], torch.empty(0)))

    @classmethod
    def of(cls, registry: dict[str, Any], key: str, name: str) -> ListedPlace:
        """Take over a list."""
        place = cls(registry, key, name, "cat")
        place.put(place.tensor)
        return place

    @property
    def tensor(self) -> Tensor:
        """All that the list has now, in one tensor; the same one until the list changes.

        Raises:
            ModelError: there is no list of tensors any more; names the place.
        """
        listed = self._held()
        if len(listed) == 1 and listed[0].dim():
            only: Tensor = listed[0]
            return only
        if not listed:
            return self._nothing
        if not self._joined.is_of(listed):
            self._joined.of = [(one, version_of(one, self.name)) for one in listed]
            self._joined.tensor = torch.cat([torch.atleast_1d(one) for one in listed])
        return self._joined.tensor

    @property
    def is_held(self) -> bool:
        """Whether there is a list of tensors."""
        listed = self.registry.get(self.key)
        return isinstance(listed, list) and all(isinstance(one, Tensor) for one in listed)

    @property
    def form(self) -> list[Any]:
        """What no list tells before something is in it."""
        return ["list"]

    def fits(self, value: Tensor, present: Tensor | None = None) -> bool:
        """Whether a tensor may come to be here: behind others those like them."""
        present = self.tensor if present is None else present
        if not value.dim() or value.dim() > MOST_DIMENSIONS or value.dtype not in KEPT:
            return False
        (dtype, shape), (other_dtype, other_shape) = form_of(value), form_of(present)
        return not len(value) or not len(present) or [dtype, shape[1:]] == [other_dtype, other_shape[1:]]

    def put(self, tensor: Tensor) -> None:
        """Have one tensor in the list, or none."""
        self.registry[self.key] = [tensor] if len(tensor) else []

    def set(self, value: Tensor) -> None:
        """Have one tensor of this value in the list, or none."""
        self.put(value.clone())
