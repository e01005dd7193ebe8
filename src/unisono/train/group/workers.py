"""The workers of this generation, and the things they do together."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unisono.checkpoint.codec import flatten, unflatten
from unisono.checkpoint.layout import empty_as, form_of, require_values
from unisono.device import is_accelerator
from unisono.errors import CheckpointError, JobMismatch, Unreadable
from unisono.job import differences
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree
from unisono.received import LARGEST_JSON, parse_json, short
from unisono.reduce.data_network import NetworkKeys
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.reduce.transport import Transport
from unisono.train.model.tensors import checksum

Operation = Literal["mean", "sum", "max", "min"]

CPU = torch.device("cpu")

SAME = "All workers need the same, or their weights would differ"
"""What to do about workers that differ."""


class Workers:
    """The collective verbs: every worker calls the same ones in the same order.

    Args:
        generation: the generation that these workers form.
        transport: the transport between them.
        host: the host name or address under which others reach this worker; empty if all are on one host.
        devices: the devices of this worker; by default one. These verbs are then among the devices of one rank in their
            workers, each of which holds its slices of the state.
        keys: the keys of the network between them; None if all are on one host, or if others may read what they say.
        device: the device of this worker, on which it gets what others broadcast from theirs.

    Attributes:
        servers: the number of workers, those of the highest ranks, that are to serve and compute nothing; equal on all.
        ticks: a count of this worker's signs of progress: shards computed, batches evaluated.
        is_called: whether a collective call of the script is under way.
        is_asking: whether it waits for another worker, other than in the transport.
    """

    def __init__(
        self,
        generation: Generation,
        transport: Transport,
        host: str = "",
        devices: Devices | None = None,
        keys: NetworkKeys | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.generation = generation
        self.transport = transport
        self.host = host
        self.keys = keys
        self.devices = Devices() if devices is None else devices
        self.servers = 0
        self.ticks = 0
        self.is_called = self.is_asking = False
        self.is_aborted = False
        self._abort: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether anything goes over a network of torch's, which knows no secret: other users of its hosts reach it."""
        is_torchs = isinstance(self.transport, ProcessGroupTransport) and self.keys is None
        return is_torchs or self.devices.count > 1

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.generation.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.generation.world_size

    @property
    def process(self) -> int:
        """The number of this process, among those of all devices of all workers."""
        return self.rank * self.devices.count + self.devices.rank

    @property
    def is_main(self) -> bool:
        """Whether this is the first device of the main worker, which prints and writes files."""
        return self.rank == 0 and self.devices.is_first

    @property
    def waits(self) -> bool:
        """Whether this worker waits for another one."""
        return self.is_asking or self.transport.waits or self.devices.waits

    def tick(self) -> None:
        """This worker has got on."""
        self.ticks += 1

    def attach(self, abort: Callable[[], None] | None) -> None:
        """Have this called as well when the workers part; None for nothing."""
        self._abort = abort
        if self.is_aborted and abort is not None:
            abort()

    def abort(self) -> None:
        """Wake whoever waits for another worker, here and there: it raises ``WorkerLost``. From any thread."""
        self.is_aborted = True
        self.transport.abort()
        self.devices.abort()
        if (abort := self._abort) is not None:
            abort()

    def split(self, shards: int) -> Split:
        """Who computes which of so many shards. Where all would have to serve, all compute and serve.

        Args:
            shards: the number of shards of a batch, a multiple of the job's.
        """
        return self.generation.split.with_servers(self.servers).refined(shards)

    def gather_json(self, value: Any) -> list[Any]:
        """Every worker's JSON value, in the order of ranks.

        Raises:
            Unreadable: a worker said something else; names it.
        """
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.transport.all_gather(torch.tensor([data.numel()])).flatten().tolist()
        for rank, length in enumerate(lengths):
            if not 0 <= length <= LARGEST_JSON:
                raise Unreadable(
                    f"rank {rank} announces {length} bytes of JSON: at most {LARGEST_JSON} can be told. Most "
                    f"likely it is in another call than this worker: all make the same calls in the same order, also "
                    f"in a function of run.together, and where one of them has caught an error"
                )
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.transport.all_gather(padded)
        return [_said(rank, row[:length]) for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))]

    def require_same(self, what: str, fields: Mapping[str, Any], cure: str = SAME) -> None:
        """Refuse to go on with workers that differ.

        Args:
            what: the name of what they compare.
            fields: this worker's values by name.
            cure: what to do where they differ.

        Raises:
            JobMismatch: names the ranks, the fields and both values.
        """
        everybody = self.gather_json(dict(fields))
        for rank, theirs in enumerate(everybody):
            if not isinstance(theirs, dict):
                raise JobMismatch(
                    f"rank {rank} makes another call than this worker, which compares its {what}. Every worker has to "
                    f"make the same calls in the same order (step.run, run.evaluate, run.barrier ...): none inside of "
                    f"`if run.is_main`"
                )
            unequal = differences(everybody[0], theirs)
            if unequal:
                listed = "\n  ".join(unequal)
                hosts = self.gather_json(platform.node())  # all workers see the same difference
                where = f"rank {rank} on host {hosts[rank]}", f"rank 0 on host {hosts[0]}"
                one, other = where if hosts[rank] != hosts[0] else (f"rank {rank}", "rank 0")
                raise JobMismatch(
                    f"{one} has another {what} than {other} (here: rank 0, there: rank {rank}):\n  {listed}\n{cure}"
                )

    def gather_rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        """Every worker's rows below each other, in the order of ranks.

        Args:
            local: this worker's rows, of shape (counts[rank], …).
            counts: the number of rows of each worker.
        """
        if self.world_size == 1:
            return local
        padded = local.new_zeros((max(counts), *local.shape[1:]))
        padded[: counts[self.rank]] = local
        # Bytes travel alike on every backend, whatever the dtype.
        rows = self.transport.all_gather(padded.reshape(-1).view(torch.uint8))
        blocks = rows.view(-1).view(local.dtype).reshape(self.world_size, max(counts), *local.shape[1:])
        return require_values(torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)]))

    def all_reduce(self, value: Any, operation: Operation = "mean") -> Any:
        """Combine one number or tensor per worker, in the order of ranks.

        Args:
            value: a number, or a tensor of the same shape and dtype on every worker.
            operation: ``mean``, ``sum``, ``max`` or ``min``.

        Returns:
            the same on every worker; a number for a number, a new tensor for a tensor.

        Raises:
            ValueError: an unknown operation, or a bool tensor.
        """
        if operation not in ("mean", "sum", "max", "min"):
            raise ValueError(f"all_reduce({short(operation)}): use 'mean', 'sum', 'max' or 'min'")
        if not isinstance(value, Tensor):
            is_whole = isinstance(value, int | np.integer) and operation != "mean"
            dtype = torch.int64 if is_whole else torch.float64
            return self.all_reduce(torch.tensor(value, dtype=dtype), operation).item()
        if value.dtype == torch.bool:
            raise ValueError("all_reduce of a bool tensor: convert it to the numbers that you mean, with .int()")
        local = value.detach().reshape(1, -1)
        rows = self.gather_rows(local, [1] * self.world_size)
        return _combined(rows, operation).reshape(value.shape).clone()

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of the worker ``source``: a tensor, a number, text, or lists and dicts of them.

        What lies on a device there lies on this worker's device here.

        Raises:
            CheckpointError: a part of the value is of no such type; names it. Or what came is no such value.
            JobMismatch: what arrived is not what was sent.
        """
        if self.world_size == 1:
            return value
        skeleton, tensors = flatten(value) if self.rank == source else (None, {})
        forms = {name: [*form_of(tensor), is_accelerator(tensor.device)] for name, tensor in tensors.items()}
        told = [skeleton, forms, _seal(skeleton, tensors)] if self.rank == source else None
        match self.gather_json(told)[source]:
            case [skeleton, dict(forms), str(seal)]:
                return self._received(source, skeleton, {**forms, **tensors}, seal)
            case announced:
                raise CheckpointError(f"rank {source} announces {short(announced)}, which is no value with its tensors")

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self.transport.all_gather(torch.zeros(1, dtype=torch.uint8))

    def close(self) -> None:
        """Let go of the connections."""
        self.transport.close()
        self.devices.close()

    def _received(self, source: int, skeleton: Any, places: Mapping[str, Any], seal: str) -> Any:
        """The value, once its tensors are here.

        Args:
            source: the rank of the worker that sends the value.
            skeleton: see :func:`~unisono.checkpoint.codec.flatten`.
            places: the tensors by name, or on the other workers what they will be like.
            seal: a digest of skeleton and places.
        """
        received = {
            name: self._broadcast_tensor(place if isinstance(place, Tensor) else self._room_for(place), source)
            for name, place in places.items()
        }
        value = unflatten(skeleton, received)
        if _seal(skeleton, received) != seal:
            raise JobMismatch(
                f"rank {self.rank} was given other bits than rank {source} sent: a fault of a host's memory, or of "
                f"Unisono's. This worker ends, and has used nothing of them"
            )
        return value

    def _room_for(self, form: Any) -> Tensor:
        match form:
            case [name, shape, bool(is_on_device)]:
                return empty_as([name, shape], self.device if is_on_device else CPU)
        raise CheckpointError(f"{short(form)} is no dtype with a shape and a place")

    def _broadcast_tensor(self, tensor: Tensor, source: int) -> Tensor:
        if tensor.numel():
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self.transport.broadcast(data, source)
            return require_values(data.view(tensor.dtype).reshape(tensor.shape))
        return tensor


def _seal(skeleton: Any, tensors: Mapping[str, Tensor]) -> str:
    """By which whoever is given a value knows that it is the one that was sent."""
    try:
        return hashlib.sha256(f"{json.dumps(skeleton)} {checksum(tensors)}".encode()).hexdigest()
    except (RecursionError, UnicodeError) as error:
        raise CheckpointError(f"a value is nested too deep, or has a name that is no text: {error}") from error


def _said(rank: int, row: Tensor) -> Any:
    try:
        return parse_json(row.numpy().tobytes())
    except Unreadable as error:
        raise Unreadable(f"rank {rank} says what cannot be read: {error}") from error


def _combined(rows: Tensor, operation: Operation) -> Tensor:
    if operation == "max":
        return rows.amax(0)
    if operation == "min":
        return rows.amin(0)
    leaves = {Node(rank, rank + 1): row for rank, row in enumerate(rows)}
    total: Tensor = SummationTree(len(rows)).finish(leaves, torch.add)
    return total if operation == "sum" else total / len(rows)


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
        speak: Callable[[DeviceMesh], Workers],
        speak_beside: Callable[[DeviceMesh], Workers],
    ) -> None:
        self._form, self._speak, self._speak_beside = form, speak, speak_beside
        self.losses: int | None = None
        self.is_parallel = False

    @cached_property
    def mesh(self) -> DeviceMesh:
        """It. Collective, the first time."""
        return self._form()

    @cached_property
    def verbs(self) -> Workers:
        """The verbs among the devices. Collective, the first time."""
        return self._speak(self.mesh)

    @cached_property
    def writing(self) -> Workers:
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
        inside: Workers | None = None,
        exchange: ProcessGroupTransport | None = None,
        back: ProcessGroupTransport | None = None,
    ) -> None:
        self.rank, self.count = rank, count
        self._mesh, self._inside, self._exchange, self._back = mesh, inside, exchange, back

    @property
    def inside(self) -> Workers:
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
    def _connections(self) -> list[Workers | ProcessGroupTransport]:
        return [each for each in (self._inside, self._exchange, self._back) if each is not None]
