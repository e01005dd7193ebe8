"""The devices of a worker: one process each, which hold its model together and compute its shards side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unisono.reduce.process_group import ProcessGroupTransport


@dataclass(frozen=True, slots=True)
class Round:
    """Shards that the devices of a worker compute at the same time.

    Attributes:
        shards: the shards, one per device in the order of their ranks; fewer than devices in the last round.
        devices: the devices that tell of these shards, in their order.
        own: the shard that this device computes. Passes through a sliced model are collective: without one of its own a
            device computes another one's again.
        counts: whether what comes of it here counts.
    """

    shards: range
    devices: range
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

    @property
    def waits(self) -> bool:
        """Whether this device waits for another one."""

    def abort(self) -> None:
        """Wake whoever waits for another device, here and there."""

    def close(self) -> None:
        """Let go of the connections."""


class Mesh:
    """The devices of a worker as torch wants them, in its default group: as long as there is the worker.

    No loss of another worker disturbs it, so nothing may wait in it for a device that such a loss may keep elsewhere:
    it is for what devices do between collective calls.

    Args:
        form: a function that makes it; collective.
        speak: a function that gives the devices their verbs in it.
        speak_beside: a function that gives them verbs in a group beside it; collective.

    Attributes:
        losses: the device that computes the losses of all shards, in stages with the others; None where each computes
            its own shards.
        is_parallel: whether all devices compute each shard, in tensor parallel with each other.
    """

    def __init__(
        self,
        form: Callable[[], DeviceMesh],
        speak: Callable[[DeviceMesh], Verbs],
        speak_beside: Callable[[DeviceMesh], Verbs],
    ) -> None:
        self._form, self._speak, self._speak_beside = form, speak, speak_beside
        self.losses: int | None = None
        self.is_parallel = False

    @cached_property
    def mesh(self) -> DeviceMesh:
        """It. Collective, the first time."""
        return self._form()

    @cached_property
    def verbs(self) -> Verbs:
        """The verbs among the devices. Collective, the first time."""
        return self._speak(self.mesh)

    @cached_property
    def writing(self) -> Verbs:
        """The verbs for those who write checkpoints, while the others are in use. Collective, the first time."""
        return self._speak_beside(self.mesh)

    @property
    def waits(self) -> bool:
        """Whether this device waits for another one."""
        return "verbs" in vars(self) and self.verbs.waits

    def close(self) -> None:
        """Let go of torch's default group."""
        if "mesh" in vars(self):
            dist.destroy_process_group()


class Devices:
    """The devices of this worker, of which this process drives one.

    Args:
        rank: this device's place among them.
        count: their number.
        mesh: torch's default group of them; None for a worker of one device.
        inside: the collective verbs among them in a generation; None while this worker is in none.
        exchange: the way of their tensors in a generation; None while this worker is in none.
        back: a way beside that, for what goes from stages to those before them.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        mesh: Mesh | None = None,
        inside: Verbs | None = None,
        exchange: ProcessGroupTransport | None = None,
        back: ProcessGroupTransport | None = None,
    ) -> None:
        self.rank, self.count = rank, count
        self._mesh, self._inside, self._exchange, self._back = mesh, inside, exchange, back

    @property
    def inside(self) -> Verbs:
        """The collective verbs among the devices of this worker."""
        assert self._inside is not None, "this worker is in a generation, with several devices"
        return self._inside

    @property
    def exchange(self) -> ProcessGroupTransport:
        """The way of their tensors."""
        assert self._exchange is not None, "this worker is in a generation, with several devices"
        return self._exchange

    @property
    def back(self) -> ProcessGroupTransport:
        """The way of what goes from stages to those before them."""
        return self._back or self.exchange

    def settle(self) -> None:
        """Wait until what was asked of the other devices is really here; see :meth:`Transport.settle`."""
        for way in (self._exchange, self._back):
            if way is not None:
                way.settle()

    @property
    def losses(self) -> int | None:
        """The device that computes the losses of all shards; None where each computes its own shards."""
        return None if self._mesh is None else self._mesh.losses

    @property
    def is_parallel(self) -> bool:
        """Whether all devices compute each shard, in tensor parallel with each other."""
        return self._mesh is not None and self._mesh.is_parallel

    @property
    def is_first(self) -> bool:
        """Whether this device speaks for the worker: it prints and writes."""
        return self.rank == 0

    @property
    def mesh(self) -> Mesh:
        """The devices as long as there is the worker."""
        assert self._mesh is not None, "a worker of one device needs no mesh"
        return self._mesh

    @property
    def waits(self) -> bool:
        """Whether this device waits for another one."""
        between = self._mesh is not None and self._mesh.waits
        return between or any(each.waits for each in self._connections)

    def rounds(self, shards: range) -> Sequence[Round]:
        """How the devices distribute the shards of their worker: in turns, so that they add up in their order.

        Those that hold stages, or parts of layers, compute each shard together.
        """
        if self.is_parallel:
            return [Round(range(shard, shard + 1), range(1), shard, counts=True) for shard in shards]
        if self.losses is not None:
            last = range(self.losses, self.losses + 1)
            return [Round(range(shard, shard + 1), last, shard, self.rank == self.losses) for shard in shards]
        return [
            Round(
                together, range(len(together)), together[min(self.rank, len(together) - 1)], self.rank < len(together)
            )
            for start in range(shards.start, shards.stop, self.count)
            for together in (range(start, min(start + self.count, shards.stop)),)
        ]

    def gather(self, value: Any) -> list[Any]:
        """Every device's JSON value, in the order of their ranks."""
        return [value] if self._inside is None else self._inside.gather_json(value)

    def joined(self, values: Sequence[Any]) -> list[Any]:
        """JSON values of all devices in one row, in the order of their ranks: what this worker says to the others."""
        return [one for each in self.gather(list(values)) for one in each]

    def all(self, value: bool) -> bool:
        """Whether something holds on all devices."""
        return all(self.gather(value))

    def first(self, value: Any) -> Any:
        """The JSON value of the first device."""
        return self.gather(value)[0]

    def abort(self) -> None:
        """Wake whoever waits for another device in this generation, here and there. From any thread."""
        for each in self._connections:
            each.abort()

    def close(self) -> None:
        """Let go of the connections of this generation."""
        for each in self._connections:
            each.close()

    @property
    def _connections(self) -> list[Verbs | ProcessGroupTransport]:
        return [each for each in (self._inside, self._exchange, self._back) if each is not None]
