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


class SliceExchange(Protocol):
    """The way of FSDP's tensors between the devices of a worker in a generation. What it raises is ``WorkerLost``."""

    @property
    def waits(self) -> bool:
        """Whether this device waits for another one."""

    def gather_into(self, rows: Tensor, row: Tensor) -> None:
        """Every device's ``row`` in the order of ranks, 1-D; ``row`` may be a part of ``rows``."""

    def swap(self, received: Tensor, sent: Tensor) -> None:
        """Every device gets one row of every other one's: row j of ``sent`` is for device j."""

    def abort(self) -> None:
        """Wake whoever waits for another device, here and there."""

    def close(self) -> None:
        """Let go of the connections."""


class Mesh:
    """The devices of a worker as FSDP wants them, in torch's default group: as long as there is the worker.

    No loss of another worker disturbs it, so nothing may wait in it for a device that such a loss may keep elsewhere:
    it is for what devices do between collective calls.

    Args:
        form: a function that makes it; collective.
    """

    def __init__(self, form: Callable[[], DeviceMesh]) -> None:
        self._form = form

    @cached_property
    def mesh(self) -> DeviceMesh:
        """It. Collective, the first time."""
        return self._form()

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
        exchange: the way of FSDP's tensors in a generation; None while this worker is in none.

    Attributes:
        losses: the device that computes the losses of all shards, in stages with the others; None where each computes
            its own shards.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        mesh: Mesh | None = None,
        inside: Verbs | None = None,
        exchange: SliceExchange | None = None,
    ) -> None:
        self.rank, self.count = rank, count
        self._mesh, self._inside, self._exchange = mesh, inside, exchange
        self.losses: int | None = None

    @property
    def inside(self) -> Verbs:
        """The collective verbs among the devices of this worker."""
        assert self._inside is not None, "this worker is in a generation, with several devices"
        return self._inside

    @property
    def exchange(self) -> SliceExchange:
        """The way of FSDP's tensors."""
        assert self._exchange is not None, "this worker is in a generation, with several devices"
        return self._exchange

    @property
    def is_first(self) -> bool:
        """Whether this device speaks for the worker: it prints and writes."""
        return self.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        """The devices as FSDP wants them. Collective, the first time."""
        assert self._mesh is not None, "a worker of one device needs no mesh"
        return self._mesh.mesh

    @property
    def waits(self) -> bool:
        """Whether this device waits for another one."""
        return any(each.waits for each in self._connections)

    def rounds(self, shards: range) -> Sequence[Round]:
        """How the devices distribute the shards of their worker: in turns, so that they add up in their order.

        Those that hold stages compute each shard together.
        """
        if self.losses is not None:
            last = range(self.losses, self.losses + 1)
            return [Round(range(shard, shard + 1), last, shard, self.rank == self.losses) for shard in shards]
        return [
            Round(
                together,
                range(len(together)),
                together[min(self.rank, len(together) - 1)],
                self.rank < len(together),
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
    def _connections(self) -> list[Verbs | SliceExchange]:
        return [each for each in (self._inside, self._exchange) if each is not None]
