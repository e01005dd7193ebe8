"""The devices of a worker: one process each, which hold its model together and compute its shards side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Round:
    """Shards that the devices of a worker compute at the same time.

    Attributes:
        shards: the shards, one per device in the order of their ranks; fewer than devices in the last round.
        own: the shard that this device computes. Passes through a sliced model are collective: without one of its own a
            device computes another one's again.
        counts: whether what comes of it here counts.
    """

    shards: range
    own: int
    counts: bool


class Verbs(Protocol):
    """The collective verbs among the devices of a worker: those of :class:`~unisono.train.group.workers.Workers`."""

    @property
    def rank(self) -> int:
        """This device's place among them."""

    @property
    def world_size(self) -> int:
        """Their number."""

    def gather_json(self, value: Any) -> list[Any]:
        """Every device's JSON value, in the order of ranks."""

    def gather_rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        """Every device's rows below each other, in the order of ranks."""

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of the device ``source``."""

    def close(self) -> None:
        """Let go of the connections."""


class Devices:
    """The devices of this worker, of which this process drives one.

    Args:
        inside: the collective verbs among them; None for a worker of one device.
        form_mesh: a function that makes torch's default group of them; collective.

    Attributes:
        rank: this device's place among them.
        count: their number.
    """

    def __init__(self, inside: Verbs | None = None, form_mesh: Callable[[], DeviceMesh] | None = None) -> None:
        self._inside, self._form_mesh = inside, form_mesh
        self.rank, self.count = (0, 1) if inside is None else (inside.rank, inside.world_size)

    @property
    def inside(self) -> Verbs:
        """The collective verbs among the devices of this worker."""
        assert self._inside is not None, "a worker of one device needs no verbs"
        return self._inside

    @property
    def is_first(self) -> bool:
        """Whether this device speaks for the worker: it prints and writes."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        """Torch's group of the devices."""
        return self.mesh.get_group()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The devices as FSDP wants them, in torch's default group. Collective, the first time."""
        assert self._form_mesh is not None, "a worker of one device needs no mesh"
        return self._form_mesh()

    def rounds(self, shards: range) -> Sequence[Round]:
        """How the devices distribute the shards of their worker: in turns, so that they add up in their order."""
        return [
            Round(together, together[min(self.rank, len(together) - 1)], self.rank < len(together))
            for start in range(shards.start, shards.stop, self.count)
            for together in (range(start, min(start + self.count, shards.stop)),)
        ]

    def gather(self, value: Any) -> list[Any]:
        """Every device's JSON value, in the order of their ranks."""
        return [value] if self._inside is None else self._inside.gather_json(value)

    def first(self, value: Any) -> Any:
        """The JSON value of the first device."""
        return self.gather(value)[0]

    def close(self) -> None:
        """Let go of the connections."""
        if self._inside is not None:
            self._inside.close()
        if "mesh" in vars(self):
            dist.destroy_process_group()
