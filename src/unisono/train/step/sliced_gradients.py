"""The gradients of a model in slices: each device adds up its slices of the gradients of all shards of its worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from unisono.adapt.squared_norms import SquaredNorms
from unisono.errors import LossError, ModelError
from unisono.reduce.buckets import ALIGNMENT, Bucket, BucketEntry, narrowed
from unisono.reduce.reducer import Reducer
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Devices, Workers
from unisono.train.model.slices import Unit, UnitParameter, units_of
from unisono.train.model.tensors import COUNTS_HOLDERS, is_held_elsewhere
from unisono.train.step.gradients import Fusion, Gradients
from unisono.train.step.step import norm_one_by_one


@dataclass(slots=True)
class _Trained:
    """A parameter that is trained, its number, and whether the passes under way have used it."""

    parameter: UnitParameter
    number: int
    is_used: bool = False
    is_heard: bool = False


class SlicedGradients(Gradients):
    """The gradients of parameters that lie in slices on the devices of this worker.

    Where FSDP would add up the devices' gradients by itself, each device is sent its slice of every one of them, and
    adds those along the summation tree, shard by shard. What it has then is its slice of the worker's partial sums. A
    bucket is an FSDP unit.

    Args:
        parameters: the slices of this device, by name.
        units: the FSDP units of the models.
        devices: the devices of this worker.
        reducer: the reducer that adds up the slices of all workers.
        fusion: the settings of the buckets.
        norms: a counter that stays unused.
    """

    leaves_single = False

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        units: Sequence[Unit],
        devices: Devices,
        reducer: Reducer,
        fusion: Fusion,
        norms: SquaredNorms,
    ) -> None:
        numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        # Backward passes go from the last unit to the first.
        found = [(unit, _trained(unit, numbers)) for unit in reversed(units)]
        self._units = [(unit, trained) for unit, trained in found if trained]
        self._devices = devices
        self._rounds = devices.rounds(reducer.transport.split.of(reducer.transport.rank))
        self._round = -1
        self._counts = False
        self._has_come: list[bool] = []
        self._is_passing = False
        self._names = [unit.name for unit in units]
        super().__init__(parameters, reducer, fusion, norms)
        for number, unit in enumerate(units):  # before the unit is gathered
            enter = partial(self._enter, number)
            self._hooks.extend(each.register_forward_pre_hook(enter, prepend=True) for each in unit.modules)
        scratch, self._received = _Scratch(), _Scratch()
        # Passes of other calls train other units: theirs have gradients as well.
        self._exchanges = [(unit, _Exchange(_leave_out, scratch)) for unit, trained in found if not trained]
        for number, (unit, _) in enumerate(self._units):
            self._exchanges.append((unit, _Exchange(partial(self._arrive_all, number), scratch)))
        for unit in units:
            unit.modules[0].set_reduce_scatter_unused_params(True)
            unit.modules[0].set_gradient_divide_factor(1.0)
            unit.modules[0].set_force_sum_reduction_for_comms(True)

    def begin(self, step: int = 0) -> None:
        """Forget what was taken before; the rounds of this worker's devices follow."""
        super().begin(step)
        for unit, exchange in self._exchanges:
            unit.modules[0].set_custom_reduce_scatter(exchange)
        self._round, self._is_passing = -1, False
        self._clear()

    def open(self, *, last: bool) -> None:
        """The next round begins."""
        self._round += 1
        self._sends, self._counts = last, self._rounds[self._round].counts
        self._has_come = [False] * len(self._units)
        self._is_passing = True
        for _, trained in self._units:
            for one in trained:
                one.is_used = False

    def computed(self) -> None:
        """All devices have come to the end of their forward passes."""
        self._require_together(len(self._names))
        self._is_passing = False

    def _enter(self, number: int, *about: Any) -> None:
        if self._is_passing:
            self._require_together(number)

    def _require_together(self, number: int) -> None:
        """Refuse shards that call other units than those of other devices: all devices gather one unit at a time.

        Raises:
            ModelError: names the units, and says what to do.
        """
        said = self._devices.inside.gather_rows(torch.tensor([number]), [1] * self._devices.count).tolist()
        if len(set(said)) > 1:
            names = [repr(name) for name in self._names] + ["nothing more"]
            ways = ", another one ".join(dict.fromkeys(names[each] for each in said))
            raise ModelError(
                f"shards that the devices compute at the same time take different ways through the model: one calls "
                f"{ways}; but the devices gather each module of run.fully_shard together. Call it for the module that "
                f"chooses among these, and not for each of them"
            )

    def leave_out(self) -> None:
        """What comes of the passes under way does not count."""
        self._counts = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take gradients as they arrive in the backward pass that runs in here."""
        for _, trained in self._units:
            for one in trained:
                gathered = one.parameter.gathered
                if gathered is not None and not one.is_heard:
                    self._hooks.append(gathered.register_post_accumulate_grad_hook(partial(self._use, one)))
                    one.is_heard = True
        with super().listening():
            yield

    @torch.no_grad()
    def close(self) -> None:
        """The round is done: units that no device has used have nothing to add."""
        for number, has_come in enumerate(self._has_come):
            if not has_come:
                self._add(number, None)
        self._clear()

    def _clear(self) -> None:
        for unit, _ in self._exchanges:
            for parameter in unit.parameters:
                parameter.clear()

    def _planned(self, fusion: Fusion) -> tuple[Bucket, ...]:
        return tuple(_bucket(trained, fusion) for _, trained in self._units)

    def _hooked(self) -> list[torch.utils.hooks.RemovableHandle]:
        return []  # what passes use has yet to be gathered

    def _use(self, one: _Trained, gathered: Tensor) -> None:
        one.is_used = True
        if self._counts:
            self._note(one.number, gathered.grad)

    @torch.no_grad()
    def _arrive_all(self, number: int, leaves: Tensor) -> None:
        """The gradients of a unit, of this device's shard: a row for each device, of its slices."""
        unit, trained = self._units[number]
        if not self._listens:
            raise LossError(
                "the loss function went backward by itself, which a model in slices on several devices cannot take: "
                "return the loss, and leave backward() out"
            )
        if self._has_come[number]:
            raise ModelError(
                f"{unit.name} had two backward passes for one loss, since the model calls it more than once: call "
                f"run.fully_shard for the module that calls it instead"
            )
        self._has_come[number] = True
        for one in trained:
            if not (self._counts and one.is_used):  # adds nothing, not even to the sign of a zero
                leaves[:, one.parameter.start : one.parameter.start + one.parameter.padded].fill_(-0.0)
        received = self._received(leaves.numel(), leaves.dtype, leaves.device).view_as(leaves)
        self._devices.exchange.swap(received, leaves)
        self._add(number, received)

    def _add(self, number: int, leaves: Tensor | None) -> None:
        """Add the leaves of a round to a unit's sums, in the order of the shards."""
        (_, trained), sums, tally = self._units[number], self._sums[number], self._tallies[number]
        for row in range(len(self._rounds[self._round].shards)):
            sums.open()
            for place, one in enumerate(trained):
                sums.put(place, None if leaves is None else one.parameter.of(leaves[row]), tally)
            sums.close()
        if self._sends:
            self._reducer.ready(number, sums.partials(), tally)


def _leave_out(gradients: Tensor) -> None:
    """Nobody reads the gradients of a unit that a call does not train."""


class _Exchange(ReduceScatter):
    """What FSDP calls with a unit's gradients, in place of its own sum over the devices."""

    def __init__(self, arrive: Callable[[Tensor], None], scratch: _Scratch) -> None:
        self._arrive, self._scratch = arrive, scratch

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._scratch(torch.Size(size).numel(), dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._arrive(input_tensor.view(-1, output_tensor.numel()))


class _Scratch:
    """Memory for what a unit exchanges, used again by each unit of the same size: nobody reads it when that is done."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of so many elements, not initialised."""
        if device.type != "cpu":  # there it may still be read in another stream
            return torch.empty(numel, dtype=dtype, device=device)
        key = numel, dtype
        if key not in self._held:
            self._held[key] = torch.empty(numel, dtype=dtype)
        return self._held[key]


def _trained(unit: Unit, numbers: Mapping[int, int]) -> list[_Trained]:
    return [_Trained(one, numbers[id(one.slice)]) for one in unit.parameters if id(one.slice) in numbers]


def _bucket(trained: Sequence[_Trained], fusion: Fusion) -> Bucket:
    entries, offset, first = list[BucketEntry](), 0, trained[0].parameter.slice
    for one in trained:
        own = one.parameter.slice
        entries.append(BucketEntry(one.number, offset, tuple(own.shape), tuple(own.stride())))
        offset += max(1, -(-own.numel() // ALIGNMENT)) * ALIGNMENT
    return Bucket(tuple(entries), offset, narrowed(first.dtype, fusion.compressed), first.device)


class Slicing:
    """What a model in slices computes otherwise than one that each device has for itself.

    Args:
        modules: the modules.
        devices: the devices of this worker.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], devices: Devices) -> None:
        self._units, self._devices = units_of(modules), devices

    def gradients(
        self, parameters: Mapping[str, Tensor], reducer: Reducer, fusion: Fusion, norms: SquaredNorms
    ) -> SlicedGradients:
        """The gradients of trained slices."""
        return SlicedGradients(parameters, self._units, self._devices, reducer, fusion, norms)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together. Collective among the devices.

        One gradient after the other is put together, so its norm has the bits that it has where it is whole.
        """
        rows = {id(each.slice): each.held.sharded_param.shape[0] for unit in self._units for each in unit.parameters}
        return norm_one_by_one(self._whole(each.grad, rows[id(each)]) for each in parameters if each.grad is not None)

    def _whole(self, gradient: Tensor, rows: int) -> Tensor:
        most = -(-rows // self._devices.count)
        counts = [max(0, min(most, rows - device * most)) for device in range(self._devices.count)]
        return self._devices.inside.gather_rows(gradient, counts)


LARGEST_KEPT = 32 * 2**20
"""Bytes of memory that is used again. What glibc gets back of larger pieces it gives back to the system."""


class Gathering(AllGather):
    """What FSDP calls to gather a unit's parameters, in place of its own way.

    In a collective call any device may find another worker gone, and leaves: the others must not wait for it. Passes
    that a script makes between two calls go their undisturbed way over torch's default group.

    Args:
        workers: a function that returns the workers of the present generation.
    """

    def __init__(self, workers: Callable[[], Workers]) -> None:
        self._workers = workers
        self._kept: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the rows of all devices, which they are copied from at once: so it is soon used again."""
        numel = torch.Size(size).numel()
        if device.type != "cpu" or not COUNTS_HOLDERS or numel * dtype.itemsize > LARGEST_KEPT:
            return torch.empty(numel, dtype=dtype, device=device)
        kept = self._kept.setdefault((numel, dtype), [])
        free = next((each for each in kept if not is_held_elsewhere(each)), None)
        if free is None:
            kept.append(free := torch.empty(numel, dtype=dtype))
        return free.detach()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather them."""
        workers = self._workers()
        if workers.is_called:
            workers.devices.exchange.gather_into(output_tensor, input_tensor)
        else:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


_of: WeakKeyDictionary[Membership, Gathering] = WeakKeyDictionary()


def gathering_of(membership: Membership) -> Gathering:
    """The one for all units of a run: they are gathered one after the other, and so in the same memory."""
    if membership not in _of:
        reference = ref(membership)  # which the one that is kept by it must not keep

        def workers() -> Workers:
            found = reference()
            assert found is not None, "a model is in use as long as its run"
            return found.workers

        _of[membership] = Gathering(workers)
    return _of[membership]
