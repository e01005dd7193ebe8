"""A list of tensors to which shards append, as one tensor that grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.layout import KEPT, form_of
from unisono.train.model.places import BufferPlace
from unisono.train.model.tensors import version_of

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
