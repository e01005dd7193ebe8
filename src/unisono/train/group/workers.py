"""The workers of this generation, and their collective calls."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unisono.checkpoint.codec import flatten, unflatten
from unisono.checkpoint.tensor_bytes import empty_as, form_of, require_values
from unisono.device import is_accelerator
from unisono.errors import CheckpointError, JobError, JobMismatch, Unreadable
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
    """The collective calls of a generation's workers. All workers make the same ones in the same order.

    Args:
        host: the host name or address under which others reach this worker; empty if all are on one host.
        devices: the devices of this worker; by default one. If there are several, these calls are among the devices of
            one rank in their workers, each of which holds its slices of the state.
        keys: the keys of the network between them; None if all are on one host, or if others may read what they say.
        device: the device of this worker, on which it gets what others broadcast from theirs.

    Attributes:
        named_rank: the rank that messages name; ``rank`` is another one where a worker works without the others for a
            while.
        servers: the number of workers, those of the highest ranks, that serve and compute nothing; equal on all.
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
        self.rank, self.world_size = generation.rank, generation.world_size
        self.named_rank = self.rank
        self.transport = transport
        self.host = host
        self.keys = keys
        self.devices = Devices() if devices is None else devices
        self.servers = 0
        self.ticks = 0
        self.is_called = self.is_asking = False
        self.is_aborted = False
        self._abort: Callable[[], None] | None = None
        self._split: tuple[tuple[int, int], Split] | None = None

    @property
    def is_open(self) -> bool:
        """Whether anything goes over torch's own network, which knows no secret: other users of the hosts reach it."""
        is_torch = isinstance(self.transport, ProcessGroupTransport) and self.keys is None
        return is_torch or self.devices.count > 1

    @property
    def process(self) -> int:
        """The number of this process among those of all devices of all workers."""
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
        """Note that this worker has made progress."""
        self.ticks += 1

    def attach(self, abort: Callable[[], None] | None) -> None:
        """Have a function called, too, when the workers are aborted; None for no function."""
        self._abort = abort
        if self.is_aborted and abort is not None:
            abort()

    def abort(self) -> None:
        """Wake all that wait for another worker, here and there: they raise ``WorkerLost``. Any thread may call it."""
        self.is_aborted = True
        self.transport.abort()
        self.devices.abort()
        if (abort := self._abort) is not None:
            abort()

    def split(self, shards: int) -> Split:
        """Return who computes which of ``shards`` shards, a multiple of the job's.

        If all workers were servers, all of them compute and serve.
        """
        if self._split is None or self._split[0] != (shards, self.servers):
            split = self.generation.split.with_servers(self.servers).refined(shards)
            self._split = (shards, self.servers), split
        return self._split[1]

    def gather_json(self, value: Any) -> list[Any]:
        """Return every worker's JSON value, in the order of ranks.

        Raises:
            Unreadable: a worker sent something else; names it.
        """
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        # First the lengths, since all rows of a gather have the same one.
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
        return [_parsed(rank, row[:length]) for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))]

    def require_same(self, name: str, fields: Mapping[str, Any], cure: str = SAME) -> None:
        """Refuse to go on with workers whose values differ. ``cure`` says what to do where they differ.

        Raises:
            JobMismatch: names the ranks, the fields and both values.
        """
        everybody = self.gather_json(dict(fields))
        for rank, values in enumerate(everybody):
            if not isinstance(values, dict):
                raise JobMismatch(
                    f"rank {rank} makes another call than this worker, which compares its {name}. Every worker has to "
                    f"make the same calls in the same order (step.run, run.evaluate, run.barrier ...): none inside of "
                    f"`if run.is_main`"
                )
            unequal = differences(everybody[0], values)
            if unequal:
                lines = "\n  ".join(unequal)
                hosts = self.gather_json(platform.node())  # collective: all workers see the same difference
                names = f"rank {rank} on host {hosts[rank]}", f"rank 0 on host {hosts[0]}"
                other, first = names if hosts[rank] != hosts[0] else (f"rank {rank}", "rank 0")
                raise JobMismatch(
                    f"{other} has another {name} than {first} (here: rank 0, there: rank {rank}):\n  {lines}\n{cure}"
                )

    def gather_rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        """Return every worker's rows below each other, in the order of ranks.

        ``local`` has the shape (counts[rank], …).
        """
        if self.world_size == 1:
            return local
        padded = local.new_zeros((max(counts), *local.shape[1:]))
        padded[: counts[self.rank]] = local
        # Bytes travel the same way on every backend, whatever the dtype.
        rows = self.transport.all_gather(padded.reshape(-1).view(torch.uint8))
        blocks = rows.view(-1).view(local.dtype).reshape(self.world_size, max(counts), *local.shape[1:])
        return require_values(torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)]))

    def all_reduce(self, value: Any, operation: Operation = "mean") -> Any:
        """Combine one number or tensor per worker, in the order of ranks.

        Args:
            value: a number, or a tensor of the same shape and dtype on every worker.
            operation: ``mean``, ``sum``, ``max`` or ``min``.

        Returns:
            the result, the same on every worker; a number for a number, a new tensor for a tensor.

        Raises:
            JobError: an unknown operation, a bool tensor, or neither a number nor a tensor.
        """
        if operation not in ("mean", "sum", "max", "min"):
            raise JobError(f"all_reduce(…, {short(operation)}): use 'mean', 'sum', 'max' or 'min'")
        if not isinstance(value, Tensor):
            is_whole = isinstance(value, int | np.integer) and operation != "mean"
            dtype = torch.int64 if is_whole else torch.float64
            try:
                number = torch.tensor(value, dtype=dtype).reshape(())
            except (OverflowError, RuntimeError, TypeError, ValueError):  # none, several, or one that is too large
                raise JobError(f"all_reduce({short(value)}): needs a number of 64 bits, or a tensor") from None
            return self.all_reduce(number, operation).item()
        if value.dtype == torch.bool:
            raise JobError("all_reduce of a bool tensor: convert it to the numbers that you mean, with .int()")
        local = value.detach().reshape(1, -1)
        rows = self.gather_rows(local, [1] * self.world_size)
        return _combined(rows, operation).reshape(value.shape).clone()

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of the worker ``source``: a tensor, a number, text, or lists and dicts of them.

        A tensor that is on a device there is on this worker's device here.

        Raises:
            CheckpointError: a part of the value is of no such type (names it), or what arrived is no such value.
            JobMismatch: what arrived is not what was sent.
            JobError: there is no such worker.
        """
        rank: Any = source
        if not isinstance(rank, int | np.integer) or isinstance(rank, bool) or not 0 <= rank < self.world_size:
            raise JobError(f"broadcast(…, {short(source)}): needs the rank of a worker, 0 to {self.world_size - 1}")
        if self.world_size == 1:
            return value
        skeleton, tensors = flatten(value) if self.rank == source else (None, {})
        forms = {name: [*form_of(tensor), is_accelerator(tensor.device)] for name, tensor in tensors.items()}
        announcement = [skeleton, forms, _seal(skeleton, tensors)] if self.rank == source else None
        match self.gather_json(announcement)[source]:
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
        """Receive the tensors of a value, and return the value.

        Args:
            source: the rank of the worker that sends the value.
            skeleton: see :func:`~unisono.checkpoint.codec.flatten`.
            places: the tensors by name; on the other workers the dtypes, shapes and places of those to receive.
            seal: a digest of skeleton and tensors.
        """
        received = {
            name: self._broadcast_tensor(place if isinstance(place, Tensor) else self._room_for(place), source)
            for name, place in places.items()
        }
        value = unflatten(skeleton, received)
        if _seal(skeleton, received) != seal:
            raise JobMismatch(
                f"rank {self.rank} received other bits than rank {source} sent: a fault of a host's memory, or of "
                f"Unisono. They were not used; this worker ends"
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
    """A digest by which a worker that receives a value knows that it is the one that was sent."""
    try:
        return hashlib.sha256(f"{json.dumps(skeleton)} {checksum(tensors)}".encode()).hexdigest()
    except (RecursionError, UnicodeError) as error:
        raise CheckpointError(f"a value is nested too deep, or has a name that is no text: {error}") from error


def _parsed(rank: int, row: Tensor) -> Any:
    try:
        return parse_json(row.numpy().tobytes())
    except Unreadable as error:
        raise Unreadable(f"rank {rank} sent a message that cannot be read: {error}") from error


def _combined(rows: Tensor, operation: Operation) -> Tensor:
    if operation == "max":
        return rows.amax(0)
    if operation == "min":
        return rows.amin(0)
    leaves = {Node(rank, rank + 1): row for rank, row in enumerate(rows)}
    total: Tensor = SummationTree(len(rows)).finish(leaves, torch.add)
    return total if operation == "sum" else total / len(rows)


class Mesh:
    """This worker's devices as a device mesh, in torch's default process group. It lives as long as the worker.

    The loss of another worker does not end calls in it. So nothing may wait in it for a device that such a loss may
    keep elsewhere: it serves what devices do between collective calls.

    Args:
        form: a function that makes the mesh; collective.
        speak: a function that gives the devices their collective calls in the mesh.
        speak_beside: a function that gives them collective calls in a group beside the mesh; collective.

    Attributes:
        call: the name of the run's call that has spread a model over the devices, unless in slices; empty for none.
        gathering: an object that gathers slices for all units of a run one after the other, so in the same memory.
    """

    def __init__(
        self,
        form: Callable[[], DeviceMesh],
        speak: Callable[[DeviceMesh], Workers],
        speak_beside: Callable[[DeviceMesh], Workers],
    ) -> None:
        self._form, self._speak, self._speak_beside = form, speak, speak_beside
        self.call = ""
        self.gathering: Any = None

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh. Collective, the first time."""
        return self._form()

    @cached_property
    def verbs(self) -> Workers:
        """The collective calls among the devices. Collective, the first time."""
        return self._speak(self.mesh)

    @cached_property
    def writing(self) -> Workers:
        """Collective calls for writing checkpoints, while the others are in use. Collective, the first time."""
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
        mesh: torch's default group of them; None for a worker of one device.
        inside: the collective calls among them in a generation; None while this worker is in none.
        exchange: the transport of their tensors in a generation; None while this worker is in none.
        back: a second transport, for tensors that go from stages to those before them.

    Attributes:
        is_first: whether this device speaks for the worker: it prints and writes.
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
        self.rank, self.count, self.is_first = rank, count, rank == 0
        self._mesh, self._inside, self._exchange, self._back = mesh, inside, exchange, back

    @property
    def inside(self) -> Workers:
        """The collective calls among the devices of this worker."""
        assert self._inside is not None, "this worker is in a generation, with several devices"
        return self._inside

    @property
    def exchange(self) -> ProcessGroupTransport:
        """The transport of the devices' tensors."""
        assert self._exchange is not None, "this worker is in a generation, with several devices"
        return self._exchange

    @property
    def back(self) -> ProcessGroupTransport:
        """The transport of tensors that go from stages to those before them."""
        return self._back or self.exchange

    def settle(self) -> None:
        """Wait until tensors from other devices have really arrived; see :meth:`Transport.settle`."""
        for transport in (self._exchange, self._back):
            if transport is not None:
                transport.settle()

    @property
    def words(self) -> str:
        """The number of devices, as words for people that follow those on the launcher; empty for one."""
        return f", {self.count} devices per worker" if self.count > 1 else ""

    @property
    def mesh(self) -> Mesh:
        """The devices' mesh, which lives as long as the worker."""
        assert self._mesh is not None, "a worker of one device needs no mesh"
        return self._mesh

    @property
    def waits(self) -> bool:
        """Whether this device waits for another one."""
        mesh_waits = self._mesh is not None and self._mesh.waits
        return mesh_waits or any(connection.waits for connection in self._connections)

    def gather(self, value: Any) -> list[Any]:
        """Return every device's JSON value, in the order of their ranks."""
        return [value] if self._inside is None else self._inside.gather_json(value)

    def joined(self, values: Sequence[Any]) -> list[Any]:
        """Return the JSON values of all devices in one list, in the order of their ranks: those of this worker."""
        return [value for of_device in self.gather(list(values)) for value in of_device]

    def all(self, value: bool) -> bool:
        """Whether ``value`` is true on all devices."""
        return all(self.gather(value))

    def first(self, value: Any) -> Any:
        """Return the JSON value of the first device."""
        return self.gather(value)[0]

    def abort(self) -> None:
        """Wake all that wait for another device in this generation, here and there. Any thread may call it."""
        for connection in self._connections:
            connection.abort()

    def close(self) -> None:
        """Let go of the connections of this generation."""
        for connection in self._connections:
            connection.close()

    @property
    def _connections(self) -> list[Workers | ProcessGroupTransport]:
        return [connection for connection in (self._inside, self._exchange, self._back) if connection is not None]
