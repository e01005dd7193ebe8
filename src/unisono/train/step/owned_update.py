"""The update of whole matrices: each has one owner, which works it out for all workers, or devices of a worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.codec import flatten, unflatten
from unisono.errors import ModelError
from unisono.plan.owners import owners_of
from unisono.received import short, value_of
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Devices, Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.slices import held_whole
from unisono.train.model.update import Update, has_own_step, is_hooked, set_hyperparameters, tell_schedulers
from unisono.train.model.whole_matrix import Cost, cost_of, products
from unisono.train.step.tensor_trees import Announcements, Form, form, forms_of, row_of, size_of, tensors_in
from unisono.train.step.trial_step import Changes, Held, copied, merged, try_step


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor that is updated as a whole.

    Attributes:
        number: its number among all of them.
        optimizer: the number of its optimizer.
        group: the number of its group there.
        parameter: what this device holds of it.
        shape: the shape of all of it.
        worker: the rank of the worker that owns it.
        device: the device of that worker.
    """

    number: int
    optimizer: int
    group: int
    parameter: Tensor
    shape: tuple[int, ...]
    worker: int
    device: int


Worked = dict[int, tuple[Tensor, dict[str, Any]]]
"""Of matrices, by number: the new value of what this device holds, and the new state."""


def matrices_of(optimizers: Sequence[Optimizer], crew: int, devices: Devices) -> list[Matrix]:
    """All matrices, each with its owner.

    Args:
        optimizers: all optimizers. Only some of them may update whole matrices.
        crew: the number of workers that share the work.
        devices: the devices of this worker, which share it, too, where matrices lie in slices.

    Raises:
        ModelError: a cost is no number, or cannot be one.
    """
    found, costs = [], []
    for number, optimizer in enumerate(optimizers):
        if (cost := cost_of(optimizer)) is None:
            continue
        for group, settings in enumerate(optimizer.param_groups):
            for parameter in settings["params"]:
                whole = held_whole(parameter)
                shape = tuple((parameter if whole is None else whole).shape)
                found.append((number, group, parameter, shape))
                costs.append(_checked_cost(optimizer, cost, shape))
    is_sliced = any(held_whole(parameter) is not None for _, _, parameter, _ in found)
    members = devices.count if is_sliced else 1
    owners = owners_of(costs, crew * members)
    return [
        Matrix(number, *each, worker=owner // members, device=owner % members)
        for number, (each, owner) in enumerate(zip(found, owners, strict=True))
    ]


def _checked_cost(optimizer: Optimizer, cost: Cost, shape: tuple[int, ...]) -> float:
    found: Any = cost(shape)  # a function of the user
    if isinstance(found, int | float) and found >= 0 and math.isfinite(found):
        return float(found)
    raise ModelError(
        f"unisono.whole_matrix({type(optimizer).__name__}, cost=…): a tensor of shape {shape} costs {short(found)}: "
        "let the function return a number from 0 up, the same on all workers"
    )


Try = Callable[[Sequence[Matrix], Mapping[int, Held]], dict[int, Changes]]
"""Has optimizers make their steps on whole copies of matrices."""


class MatrixSlices:
    """The way of matrices from the devices of a worker to their owners, and back.

    A slice holds what optimizers keep for each element, such as momentum. What they keep besides is whole on each
    device: of the form of no slice, like the factors of Shampoo.

    Args:
        devices: the devices of this worker.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices, self._known = devices, Announcements(devices.inside.gather_json)

    def worked_out(
        self, matrices: Sequence[Matrix], optimizers: Sequence[Optimizer], step: Try
    ) -> tuple[Worked, dict[int, Changes]]:
        """What comes of matrices, in slices. Collective among the devices; changes nothing.

        Args:
            matrices: the matrices of this worker.
            optimizers: all optimizers.
            step: a function that has optimizers make their steps.

        Raises:
            ModelError: an optimizer keeps a tensor that is neither whole nor like its parameter; names it.
        """
        used = [each for each in matrices if each.parameter.grad is not None]
        held = self._gathered(used, optimizers)
        own = [each for each in matrices if each.device == self._devices.rank]
        changes = step(own, held)
        return self._scattered(used, held, changes)

    def _gathered(self, used: Sequence[Matrix], optimizers: Sequence[Optimizer]) -> dict[int, Held]:
        """The matrices of this device, whole."""
        states = {each.number: optimizers[each.optimizer].state.get(each.parameter, {}) for each in used}
        names = {
            number: [name for name, value in state.items() if _is_sliced(value)] for number, state in states.items()
        }
        owned = [[each for each in used if each.device == device] for device in range(self._devices.count)]

        def parts(each: Matrix) -> list[Tensor]:
            assert each.parameter.grad is not None, "it is used"
            state = states[each.number]
            return [each.parameter, each.parameter.grad, *(state[name] for name in names[each.number])]

        def forms(device: int, owner: int) -> list[Form]:
            return [self._cut(form(part), each, device) for each in owned[owner] for part in parts(each)]

        size = max(size_of(forms(0, owner)) for owner in range(self._devices.count))  # the first has most rows
        rows = self._swap([[part for each in mine for part in parts(each)] for mine in owned], size, used)
        mine = owned[self._devices.rank]
        slices = [tensors_in(row, forms(device, self._devices.rank)) for device, row in enumerate(rows)]
        wholes = iter([torch.cat(group) for group in zip(*slices, strict=True)])
        found = {}
        for each in mine:
            value, gradient = next(wholes), next(wholes)
            gathered = {name: next(wholes) for name in names[each.number]}
            state = {
                name: gathered[name] if name in gathered else copied(kept) for name, kept in states[each.number].items()
            }
            found[each.number] = Held(each.group, value, gradient, state)
        return found

    def _scattered(
        self, used: Sequence[Matrix], held: Mapping[int, Held], changes: dict[int, Changes]
    ) -> tuple[Worked, dict[int, Changes]]:
        """Slices of what the owners have worked out."""
        matrices = {each.number: each for each in used}
        cut, rest = _apart(held, matrices)
        skeletons, tensors = zip(flatten(cut), flatten(rest), strict=True)
        listed = [list(each.values()) for each in tensors]
        numbers = [[number, 1 + sum(map(_is_sliced, one.state.values()))] for number, one in held.items()]
        told = self._known.exchange(
            [numbers, *skeletons, *map(list, tensors), *map(forms_of, listed), [[*pair] for pair in _rows(changes)]]
        )
        everybody = [value_of(_AnnouncedSlices, one, "what another device has worked out") for one in told]

        def forms(owner: int, device: int) -> list[Form]:
            counts, _, _, _, _, sliced, whole, _ = everybody[owner]
            of = [matrices[number] for number, count in counts for _ in range(count)]
            return [*(self._cut(one, each, device) for one, each in zip(sliced, of, strict=True)), *whole]

        size = max(size_of(forms(owner, 0)) for owner in range(self._devices.count))
        of = [matrices[number] for number, count in numbers for _ in range(count)]
        sent = [
            [*(self._rows(value, each, device) for value, each in zip(listed[0], of, strict=True)), *listed[1]]
            for device in range(self._devices.count)
        ]
        received = self._swap(sent, size, used)
        worked: Worked = {}
        found: dict[int, Changes] = {}
        for owner, row in enumerate(received):
            _, sliced, whole, sliced_names, whole_names, _, _, changed = everybody[owner]
            values = tensors_in(row, forms(owner, self._devices.rank))
            here = unflatten(sliced, dict(zip(sliced_names, values[: len(sliced_names)], strict=True)))
            others = unflatten(whole, dict(zip(whole_names, values[len(sliced_names) :], strict=True)))
            for (number, value, state), (_, order, more) in zip(here, others, strict=True):
                worked[number] = value, {name: state[name] if name in state else more[name] for name in order}
            for number, group, settings in changed:
                found.setdefault(number, {})[group] = settings
        return worked, found

    def _swap(self, tensors: Sequence[Sequence[Tensor]], size: int, used: Sequence[Matrix]) -> Sequence[Tensor]:
        """Give each device its tensors, in a row of bytes, and get one from each."""
        if not size:
            return [torch.empty(0, dtype=torch.uint8)] * self._devices.count
        sent = torch.stack([row_of(each, size, used[0].parameter.device) for each in tensors])
        received = torch.empty_like(sent)
        self._devices.exchange.swap(received, sent)
        return list(received)

    def _cut(self, whole: Form, each: Matrix, device: int) -> Form:
        """The form of a device's slice of what is cut as a matrix."""
        name, shape = whole
        return name, [len(self._range(each, device)), *shape[1:]]

    def _rows(self, value: Tensor, each: Matrix, device: int) -> Tensor:
        mine = self._range(each, device)
        return value[mine.start : mine.stop]

    def _range(self, each: Matrix, device: int) -> range:
        rows = each.shape[0]
        most = -(-rows // self._devices.count)
        return range(min(rows, device * most), min(rows, (device + 1) * most))


_AnnouncedSlices = tuple[
    list[tuple[int, int]], Any, Any, list[str], list[str], list[Form], list[Form], list[tuple[int, int, dict[str, Any]]]
]


def _is_sliced(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _apart(held: Mapping[int, Held], matrices: Mapping[int, Matrix]) -> tuple[list[Any], list[Any]]:
    """What is cut, and what is whole on each device, of each matrix."""
    cut, rest = [], []
    for number, one in held.items():
        for name, value in one.state.items():
            if _is_sliced(value) and tuple(value.shape) != matrices[number].shape:
                raise ModelError(
                    f"an optimizer keeps {name} of the shape {list(value.shape)} for a parameter of the shape "
                    f"{list(matrices[number].shape)}, of which each device has a slice: use one device per worker"
                )
        cut.append([number, one.value, {name: value for name, value in one.state.items() if _is_sliced(value)}])
        whole = {name: value for name, value in one.state.items() if not _is_sliced(value)}
        rest.append([number, list(one.state), whole])
    return cut, rest


def _rows(changes: Mapping[int, Changes]) -> list[tuple[int, int, dict[str, Any]]]:
    return [(number, group, values) for number, one in changes.items() for group, values in one.items()]


class OwnedUpdate(Update):
    """Has each matrix's update worked out by its owner, before anything changes; then all make it.

    The owner runs the optimizer's own step on a copy of the whole matrix, so the bits are those of an update that
    everybody makes. Nobody keeps anything for the others between two steps: workers may be lost at any moment.

    Args:
        prepared: models and optimizers, some of which update whole matrices.
        devices: the devices of this worker. Where parameters lie in slices, they share the work, and owners gather.
        workers: the workers that share the work; None if each does all of it.
    """

    def __init__(self, prepared: Prepared, devices: Devices, workers: Workers | None) -> None:
        self._optimizers, self._workers, self._devices = prepared.optimizers, workers, devices
        crew, rank = (workers.world_size, workers.rank) if workers is not None else (1, 0)
        self._matrices, self._rank = matrices_of(prepared.optimizers, crew, devices), rank
        self._slices = (
            MatrixSlices(devices) if any(held_whole(each.parameter) is not None for each in self._matrices) else None
        )
        self._known = None if workers is None else Announcements(workers.gather_json)
        self._worked: Worked = {}
        self._changes: dict[int, Changes] = {}
        self._is_worked_out = False

    @torch.no_grad()
    def work_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Work out what comes of all matrices. Collective; changes nothing.

        Raises:
            ModelError: an optimizer of slices has hooks, or keeps what cannot be in slices.
        """
        self._is_worked_out = False
        numbers = {number for number, one in enumerate(self._optimizers) if any(one is each for each in optimizers)}
        matrices = [each for each in self._matrices if each.optimizer in numbers]
        if not matrices:
            return
        why = next(filter(None, (_why_not(self._optimizers[number]) for number in sorted(numbers))), "")
        if why and self._slices is not None:
            raise ModelError(f"a model in slices {why}")
        own = [each for each in matrices if each.worker == self._rank]
        self._worked, self._changes = ({}, {}) if why else self._worked_out(own)
        self._is_worked_out = self._exchange({each.number for each in matrices}, is_able=not why)

    @torch.no_grad()
    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the update: of matrices what was worked out, and else the optimizers' own."""
        for number, optimizer in enumerate(self._optimizers):
            if not any(optimizer is each for each in optimizers):
                continue
            own = [each for each in self._matrices if each.optimizer == number] if self._is_worked_out else []
            if not own:
                optimizer.step()
                continue
            for each in own:
                if each.number in self._worked:
                    value, state = self._worked[each.number]
                    each.parameter.copy_(value)
                    optimizer.state[each.parameter] = merged(optimizer.state[each.parameter], state)
            changes = self._changes.get(number, {})
            set_hyperparameters(optimizer, [changes.get(group, {}) for group in range(len(optimizer.param_groups))])
            tell_schedulers([optimizer])
        self._worked, self._changes, self._is_worked_out = {}, {}, False

    def _worked_out(self, own: Sequence[Matrix]) -> tuple[Worked, dict[int, Changes]]:
        """This worker's matrices."""
        if self._slices is not None:
            return self._slices.worked_out(own, self._optimizers, self._try)
        held = {
            each.number: Held.copied(
                each.group, each.parameter, self._optimizers[each.optimizer].state.get(each.parameter, {})
            )
            for each in own
            if each.parameter.grad is not None
        }
        changes = self._try(own, held)
        return {number: (one.value, one.state) for number, one in held.items()}, changes

    def _try(self, own: Sequence[Matrix], held: Mapping[int, Held]) -> dict[int, Changes]:
        """The optimizers' steps on copies of what is owned here."""
        changes = {}
        for number in sorted({each.optimizer for each in own}):
            ours = [each for each in own if each.optimizer == number]
            idle: dict[int, list[Tensor]] = {}
            for each in ours:
                if each.number not in held:
                    idle.setdefault(each.group, []).append(each.parameter)
            tensors = [held[each.number] for each in ours if each.number in held]
            changes[number] = try_step(self._optimizers[number], tensors, idle)
        return changes

    def _exchange(self, expected: set[int], *, is_able: bool) -> bool:
        """Give what was worked out to all workers. Collective. Whether all were able to work it out."""
        if self._workers is None or self._known is None or self._workers.world_size == 1:
            return is_able
        worked = [[number, value, state] for number, (value, state) in sorted(self._worked.items())]
        skeleton, tensors = flatten(worked)
        listed = list(tensors.values())
        changes = [[number, group, values] for number, one in self._changes.items() for group, values in one.items()]
        told = self._known.exchange([is_able, skeleton, list(tensors), forms_of(listed), changes])
        everybody = [value_of(_Announced, one, "what another worker has worked out") for one in told]
        if not all(able for able, *_ in everybody):
            return False
        size = max(size_of(forms) for _, _, _, forms, _ in everybody)
        device = next(iter(listed), torch.empty(0)).device
        rows = self._workers.transport.all_gather(row_of(listed, size, device))
        for rank, (_, skeleton, names, forms, changes) in enumerate(everybody):
            if rank == self._rank:
                continue
            found = unflatten(skeleton, dict(zip(names, tensors_in(rows[rank], forms), strict=True)))
            for number, value, state in value_of(list[tuple[int, Tensor, dict[str, Any]]], found, "an update"):
                if number in expected:
                    self._worked[number] = value, state
            for number, group, values in changes:
                self._changes.setdefault(number, {})[group] = values
        return True


_Announced = tuple[bool, Any, list[str], list[Form], list[tuple[int, int, dict[str, Any]]]]


def whole_update(prepared: Prepared, workers: Workers, execution: Execution) -> Update:
    """The update of a job's workers: whole matrices have owners, where that saves time."""
    matrices = [
        (one, parameter)
        for one in prepared.optimizers
        if cost_of(one) is not None
        for group in one.param_groups
        for parameter in group["params"]
    ]
    is_sliced = any(held_whole(parameter) is not None for _, parameter in matrices)
    multiplications = sum(products(tuple(each.shape)) for _, each in matrices)
    shares = workers.world_size > 1 and (is_sliced or multiplications >= execution.shared_from)
    if not matrices or not (is_sliced or shares):
        return Update()
    if _has_shared_parameters(prepared.optimizers):
        if is_sliced:
            raise ModelError("a parameter in slices belongs to several optimizers, one of which updates whole matrices")
        return Update()
    return OwnedUpdate(prepared, workers.devices, workers if shares else None)


def own_update_of(prepared: Prepared, devices: Devices) -> Update:
    """The update that a worker makes without others."""
    is_sliced = any(held_whole(each) is not None for each in prepared.parameters.values())
    return OwnedUpdate(prepared, devices, None) if is_sliced else Update()


def _has_shared_parameters(optimizers: Sequence[Optimizer]) -> bool:
    owned = [id(each) for one in optimizers for group in one.param_groups for each in group["params"]]
    return len(owned) != len(set(owned))


def _why_not(optimizer: Optimizer) -> str:
    if cost_of(optimizer) is None or not (is_hooked(optimizer) or has_own_step(optimizer)):
        return ""
    return (
        f"leaves no room for hooks on the step of {type(optimizer).__name__}, or for a step of the script's own: each "
        f"matrix is updated by one device, which sees nothing of the others"
    )
