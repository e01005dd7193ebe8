"""Gradients of a model in slices: each device adds up its slices over all shards of its worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from unisono.adapt.squared_norms import SquaredNorms
from unisono.errors import LossError, ModelError
from unisono.reduce.buckets import ALIGNMENT, Bucket, BucketEntry, narrowed
from unisono.reduce.reducer import Reducer
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.slices import Unit, UnitParameter, require_sliced, units_of
from unisono.train.model.tensors import COUNTS_HOLDERS, is_held_elsewhere
from unisono.train.step.gradients import Fusion, Gradients
from unisono.train.step.placement import SpreadPlacement
from unisono.train.step.shard_passes import Round
from unisono.train.step.step import norm_one_by_one
from unisono.train.step.summed_gradients import SummedGradients


@dataclass(slots=True)
class _Trained:
    """A trained parameter, its number, whether the passes under way have used it, and whether a hook is registered."""

    parameter: UnitParameter
    number: int
    is_used: bool = False
    has_hook: bool = False


class SlicedGradients(SummedGradients):
    """The gradients of parameters that lie in slices on the devices of this worker.

    FSDP would add up the devices' gradients by itself. Instead, each device is sent its slice of each device's
    gradients, and adds these along the summation tree, shard by shard. The result is its slice of the worker's partial
    sums. A bucket is an FSDP unit.

    Args:
        norms: a counter, which is not used.
        statistics: the number of statistics; there are none with slices.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        reducer: Reducer,
        fusion: Fusion,
        norms: SquaredNorms,
        statistics: int = 0,
        *,
        slicing: Slicing,
    ) -> None:
        numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        units, self._devices = slicing.units, slicing._devices
        # Backward passes go from the last unit to the first.
        trained_units = [(unit, _trained(unit, numbers)) for unit in reversed(units)]
        self._units = [(unit, trained) for unit, trained in trained_units if trained]
        self._rounds = slicing.rounds(reducer.transport.split.of(reducer.transport.rank))
        self._round = -1
        self._counts = False
        self._has_come: list[bool] = []
        self._is_passing = False
        self._names = [unit.name for unit in units]
        super().__init__(parameters, reducer, fusion, norms, statistics)
        for number, unit in enumerate(units):  # prepended: it has to run before FSDP's own hook gathers the unit
            enter = partial(self._enter, number)
            self._hooks.extend(module.register_forward_pre_hook(enter, prepend=True) for module in unit.modules)
        scratch, self._received = _Scratch(), _Scratch()
        # Units that this call does not train have gradients as well, which are ignored.
        self._exchanges = [(unit, _Exchange(_leave_out, scratch)) for unit, trained in trained_units if not trained]
        for number, (unit, _) in enumerate(self._units):
            self._exchanges.append((unit, _Exchange(partial(self._arrive_all, number), scratch)))
        for unit in units:
            unit.modules[0].set_reduce_scatter_unused_params(True)
            unit.modules[0].set_gradient_divide_factor(1.0)
            unit.modules[0].set_force_sum_reduction_for_comms(True)

    def begin(self, step: int = 0) -> None:
        """Forget the last step; the rounds of this worker's devices follow."""
        super().begin(step)
        for unit, exchange in self._exchanges:
            unit.modules[0].set_custom_reduce_scatter(exchange)
        self._round, self._is_passing = -1, False
        self._clear()

    def open(self, *, last: bool) -> None:
        """Begin the next round."""
        self._round += 1
        self._sends, self._counts = last, self._rounds[self._round].counts
        self._has_come = [False] * len(self._units)
        self._is_passing = True
        for _, trained in self._units:
            for entry in trained:
                entry.is_used = False

    def computed(self) -> None:
        """Check that all devices have come to the end of their forward passes."""
        self._require_together(len(self._names))
        self._is_passing = False

    def _enter(self, number: int, *about: Any) -> None:
        if self._is_passing:
            self._require_together(number)

    def _require_together(self, number: int) -> None:
        """Refuse shards that call other units than those of other devices, since all devices gather one unit at a time.

        Raises:
            ModelError: names the units, and says what to do.
        """
        numbers = self._devices.inside.gather_rows(torch.tensor([number]), [1] * self._devices.count).tolist()
        if len(set(numbers)) > 1:
            names = [repr(name) for name in self._names] + ["nothing more"]
            ways = ", another one ".join(dict.fromkeys(names[entered] for entered in numbers))
            raise ModelError(
                f"shards that the devices compute at the same time call different modules: one calls {ways}; but all "
                f"devices must gather a module of run.fully_shard together. Call run.fully_shard for the module around "
                f"these, and not for each of them"
            )

    def leave_out(self) -> None:
        """Ignore the gradients of the passes under way."""
        self._counts = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take gradients as they arrive in the backward pass that runs within the context."""
        for _, trained in self._units:
            for entry in trained:
                gathered = entry.parameter.gathered
                if gathered is not None and not entry.has_hook:
                    self._hooks.append(gathered.register_post_accumulate_grad_hook(partial(self._use, entry)))
                    entry.has_hook = True
        with super().listening():
            yield

    @torch.no_grad()
    def close(self) -> None:
        """End the round: units that no device has used add nothing to the sums."""
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
        return []  # hooks belong to gathered parameters, which do not exist yet

    def _use(self, entry: _Trained, gathered: Tensor) -> None:
        entry.is_used = True
        if self._counts:
            self._note((entry.number,), (gathered.grad,))

    @torch.no_grad()
    def _arrive_all(self, number: int, leaves: Tensor) -> None:
        """Take the gradients of a unit for this device's shard: a row for each device, with its slices."""
        unit, trained = self._units[number]
        if not self._listens:
            raise LossError(
                "the loss function called backward() itself, which a model in slices on several devices cannot take: "
                "return the loss, and leave backward() out"
            )
        if self._has_come[number]:
            raise ModelError(
                f"{unit.name} had two backward passes for one loss, since the model calls it more than once: call "
                f"run.fully_shard for the module that calls it instead"
            )
        self._has_come[number] = True
        for entry in trained:
            if not (self._counts and entry.is_used):  # adding -0.0 changes nothing, not even the sign of a zero
                leaves[:, entry.parameter.start : entry.parameter.start + entry.parameter.padded].fill_(-0.0)
        received = self._received(leaves.numel(), leaves.dtype, leaves.device).view_as(leaves)
        self._devices.exchange.swap(received, leaves)
        self._add(number, received)

    def _add(self, number: int, leaves: Tensor | None) -> None:
        """Add the gradients of a round to a unit's sums, in the order of the shards."""
        (_, trained), sums, tally = self._units[number], self._sums[number], self.checks.tallies[number]
        for row in range(len(self._rounds[self._round].shards)):
            sums.open()
            for place, entry in enumerate(trained):
                sums.put(place, None if leaves is None else entry.parameter.of(leaves[row]), tally)
            sums.close()
        if self._sends:
            self._reducer.ready(number, sums.partials(), tally)


def _leave_out(gradients: Tensor) -> None:
    """Ignore the gradients of a unit that a call does not train."""


class _Exchange(ReduceScatter):
    """Takes a unit's gradients from FSDP, in place of FSDP's own sum over the devices."""

    def __init__(self, arrive: Callable[[Tensor], None], scratch: _Scratch) -> None:
        self._arrive, self._scratch = arrive, scratch

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._scratch(torch.Size(size).numel(), dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._arrive(input_tensor.view(-1, output_tensor.numel()))


class _Scratch:
    """Memory for the exchange of units, which those of the same size share: it is read only during the exchange."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of so many elements, not initialised."""
        if device.type != "cpu":  # on an accelerator, another stream may still read it
            return torch.empty(numel, dtype=dtype, device=device)
        key = numel, dtype
        if key not in self._held:
            self._held[key] = torch.empty(numel, dtype=dtype)
        return self._held[key]


def _trained(unit: Unit, numbers: Mapping[int, int]) -> list[_Trained]:
    return [_Trained(held, numbers[id(held.slice)]) for held in unit.parameters if id(held.slice) in numbers]


def _bucket(trained: Sequence[_Trained], fusion: Fusion) -> Bucket:
    entries, offset, first = list[BucketEntry](), 0, trained[0].parameter.slice
    for entry in trained:
        tensor = entry.parameter.slice
        entries.append(BucketEntry(entry.number, offset, tuple(tensor.shape), tuple(tensor.stride())))
        offset += max(1, -(-tensor.numel() // ALIGNMENT)) * ALIGNMENT
    return Bucket(tuple(entries), offset, narrowed(first.dtype, fusion.compressed), first.device)


class Slicing(SpreadPlacement):
    """A model in slices: devices gather it unit by unit, and each computes shards of its own."""

    def __init__(self, prepared: Prepared, workers: Workers) -> None:
        super().__init__(prepared, workers)
        self.units = units_of(prepared.modules)

    @property
    def gradients(self) -> Callable[..., Gradients]:
        """The class of gradients for slices of parameters."""
        return partial(SlicedGradients, slicing=self)

    def require(self, state: Mapping[str, Any] | None) -> None:
        """Refuse parameters that do not lie in slices."""
        require_sliced(self._prepared.parameters, self._devices.count)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients. Each one is made whole, for its norm to have the same bits as on one device."""
        rows = {id(own.slice): own.held.sharded_param.shape[0] for unit in self.units for own in unit.parameters}
        return norm_one_by_one(
            self._whole(tensor.grad, rows[id(tensor)]) for tensor in parameters if tensor.grad is not None
        )

    def _rounds(self, shards: range) -> Sequence[Round]:
        count, rank = self._devices.count, self._devices.rank
        return [
            Round(together, range(len(together)), together[min(rank, len(together) - 1)], rank < len(together))
            for start in range(shards.start, shards.stop, count)
            for together in (range(start, min(start + count, shards.stop)),)
        ]

    def _whole(self, gradient: Tensor, rows: int) -> Tensor:
        most_rows = -(-rows // self._devices.count)
        counts = [max(0, min(most_rows, rows - device * most_rows)) for device in range(self._devices.count)]
        return self._devices.inside.gather_rows(gradient, counts)


LARGEST_KEPT = 32 * 2**20
"""The most bytes of a piece of memory that is kept for another use. glibc returns larger ones to the system anyway."""


class Gathering(AllGather):
    """Gathers a unit's parameters for FSDP, in place of FSDP's own way.

    In a collective call, a device that finds another worker lost leaves the call, and the other devices must not wait
    for it. So parameters are gathered over the connections of the generation. Passes that a script makes between two
    calls are gathered in torch's default group, as usual.
    """

    def __init__(self, workers: Callable[[], Workers]) -> None:
        self._workers = workers
        self._kept: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the rows of all devices. FSDP copies the rows out at once, so it is soon free again."""
        numel = torch.Size(size).numel()
        if device.type != "cpu" or not COUNTS_HOLDERS or numel * dtype.itemsize > LARGEST_KEPT:
            return torch.empty(numel, dtype=dtype, device=device)
        kept = self._kept.setdefault((numel, dtype), [])
        free = next((tensor for tensor in kept if not is_held_elsewhere(tensor)), None)
        if free is None:
            kept.append(free := torch.empty(numel, dtype=dtype))
        return free.detach()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather the rows of all devices."""
        workers = self._workers()
        if workers.is_called:
            workers.devices.exchange.gather_into(output_tensor, input_tensor)
        else:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
