"""Places of tensors that shards change: buffers of modules, and further state of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from unisono.checkpoint.tensor_bytes import KEPT, form_of
from unisono.errors import ModelError
from unisono.received import short
from unisono.train.model.tensors import set_all, version_of

Rule = Literal["mean", "first", "sum", "max", "min", "cat"]
"""The rule that combines a tensor which each shard has changed by itself."""

RULES: tuple[str, ...] = get_args(Rule)

FRESH = ("sum", "cat")
"""Rules by which each shard begins with nothing, and the results of all are added to what was there."""


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """The place that holds a buffer, or another tensor that shards change: the script may put another tensor there.

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
            ModelError: there is no tensor any more; names the place.
        """
        held = self.registry.get(self.key)
        tensor: Tensor = held if isinstance(held, Tensor) else self._held()
        return tensor

    @property
    def is_held(self) -> bool:
        """Whether there is a tensor at this place."""
        return isinstance(self.registry.get(self.key), Tensor)

    @property
    def rule(self) -> Rule:
        """The rule by which it is combined."""
        return self.chosen or ("mean" if self.tensor.is_floating_point() else "first")

    @property
    def form(self) -> list[Any]:
        """Dtype and shape, as JSON values, without the length of a tensor that grows."""
        return self._form_of(self.tensor)

    def fits(self, value: Tensor, present: Tensor | None = None) -> bool:
        """Whether a tensor may be put at this place.

        ``present`` is the one that it is to follow; by default the one that is there now.
        """
        present = self.tensor if present is None else present
        return value.dim() == present.dim() and self._form_of(value) == self._form_of(present)

    def put(self, tensor: Tensor) -> None:
        """Put another tensor at this place."""
        self.registry[self.key] = tensor

    def set(self, value: Tensor) -> None:
        """Set the tensor at this place to a value."""
        set_all([(self.tensor, value)])

    def move(self, device: torch.device) -> None:
        """Move the tensor to a device; other holders of it see it there, too."""
        if (tensor := self.tensor).device != device:
            tensor.data = tensor.data.to(device)

    def _held(self) -> Any:
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
"""The most dimensions of a tensor whose shape workers exchange to join it with others."""


@dataclass(slots=True)
class _Joined:
    """A list as one tensor, and the tensors that it was made of, with their versions."""

    of: list[tuple[Tensor, int]]
    tensor: Tensor

    def is_of(self, listed: list[Tensor]) -> bool:
        return len(listed) == len(self.of) and all(
            tensor is other and tensor._version == version
            for tensor, (other, version) in zip(listed, self.of, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ListedPlace(BufferPlace):
    """The place of a list of tensors, which together are one tensor: all of them, one behind the other.

    An empty list is a tensor of no elements, whose dtype and shape mean nothing. After a step, the list has one tensor.
    """

    _nothing: Tensor = field(default_factory=lambda: torch.empty(0))
    _joined: _Joined = field(default_factory=lambda: _Joined([], torch.empty(0)))

    @classmethod
    def of(cls, registry: dict[str, Any], key: str, name: str) -> ListedPlace:
        """Make the place of a list, and join its tensors."""
        place = cls(registry, key, name, "cat")
        place.put(place.tensor)
        return place

    @property
    def tensor(self) -> Tensor:
        """All tensors of the list joined to one; the same object until the list changes.

        Raises:
            ModelError: there is no list of tensors any more; names the place.
        """
        tensors = self._held()
        if len(tensors) == 1 and tensors[0].dim():
            only: Tensor = tensors[0]
            return only
        if not tensors:
            return self._nothing
        if not self._joined.is_of(tensors):
            self._joined.of = [(tensor, version_of(tensor, self.name)) for tensor in tensors]
            self._joined.tensor = torch.cat([torch.atleast_1d(tensor) for tensor in tensors])
        return self._joined.tensor

    @property
    def is_held(self) -> bool:
        """Whether there is a list of tensors."""
        value = self.registry.get(self.key)
        return isinstance(value, list) and all(isinstance(tensor, Tensor) for tensor in value)

    @property
    def form(self) -> list[Any]:
        """The form of every list of this kind: an empty list has neither dtype nor shape."""
        return ["list"]

    def fits(self, value: Tensor, present: Tensor | None = None) -> bool:
        """Whether a tensor may be appended to the list: it has the form of those that are in it."""
        present = self.tensor if present is None else present
        if not value.dim() or value.dim() > MOST_DIMENSIONS or value.dtype not in KEPT:
            return False
        (dtype, shape), (other_dtype, other_shape) = form_of(value), form_of(present)
        return not len(value) or not len(present) or [dtype, shape[1:]] == [other_dtype, other_shape[1:]]

    def put(self, tensor: Tensor) -> None:
        """Make a tensor the only one of the list; an empty one leaves the list empty."""
        self.registry[self.key] = [tensor] if len(tensor) else []

    def set(self, value: Tensor) -> None:
        """Make a copy of a value the only tensor of the list."""
        self.put(value.clone())
