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
from unisono.plan.split import owners_of
from unisono.received import short, value_of
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Devices, Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.shared_work import Cost, cost_of, products
from unisono.train.model.slices import held_whole
from unisono.train.model.update import Update, has_own_step, is_hooked, quiet_schedulers, set_hyperparameters
from unisono.train.state.sliced_state import is_per_element
from unisono.train.step.shared_pieces import Announcements, Form, form, forms_of, row_of, size_of, tensors_in
from unisono.train.step.trial_step import Changes, Held, copied, merged, try_step


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor that is updated as a whole.

    Attributes:
        parameter: the part of it that this device holds.
        shape: the shape of the whole matrix.
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
"""The new value of the part of a matrix that this device holds, and the new state, by the number of the matrix."""


def matrices_of(optimizers: Sequence[Optimizer], crew: int, devices: Devices) -> list[Matrix]:
    """All matrices, each with its owner.

    Only some of the optimizers may update whole matrices. ``crew`` is the number of workers that share the work; the
    devices also share it if matrices lie in slices.

    Raises:
        ModelError: a cost is no number, or not a possible one.
    """
    places, costs = [], []
    for number, optimizer in enumerate(optimizers):
        if (cost := cost_of(optimizer)) is None:
            continue
        for group, settings in enumerate(optimizer.param_groups):
            for parameter in settings["params"]:
                whole = held_whole(parameter)
                shape = tuple((parameter if whole is None else whole).shape)
                places.append((number, group, parameter, shape))
                costs.append(_checked_cost(optimizer, cost, shape))
    is_sliced = any(held_whole(parameter) is not None for _, _, parameter, _ in places)
    members = devices.count if is_sliced else 1
    owners = owners_of(costs, crew * members)
    return [
        Matrix(number, *place, worker=owner // members, device=owner % members)
        for number, (place, owner) in enumerate(zip(places, owners, strict=True))
    ]


def _checked_cost(optimizer: Optimizer, cost: Cost, shape: tuple[int, ...]) -> float:
    value: Any = cost(shape)  # the function is the user's: it may return anything
    if isinstance(value, int | float) and value >= 0 and math.isfinite(value):
        return float(value)
    raise ModelError(
        f"unisono.whole_matrix({type(optimizer).__name__}, cost=…): a tensor of shape {shape} costs {short(value)}: "
        "return a number >= 0, the same on all workers"
    )


Try = Callable[[Sequence[Matrix], Mapping[int, Held]], dict[int, Changes]]
"""Makes the steps of optimizers on whole copies of matrices."""


class MatrixSlices:
    """Sends matrices in slices from the devices of a worker to their owners, and back.

    State that an optimizer keeps for each element, such as momentum, lies in slices. Any other state is whole on each
    device; its shape is not that of a slice, like the factors of Shampoo.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices, self._announcements = devices, Announcements(devices.inside.gather_json)

    def worked_out(
        self, matrices: Sequence[Matrix], optimizers: Sequence[Optimizer], step: Try
    ) -> tuple[Worked, dict[int, Changes]]:
        """The new values and states of this worker's matrices, in slices. Collective among devices; changes nothing.

        Raises:
            ModelError: an optimizer keeps a tensor that is neither whole nor like its parameter; names it.
        """
        used = [matrix for matrix in matrices if matrix.parameter.grad is not None]
        held = self._gathered(used, optimizers)
        own = [matrix for matrix in matrices if matrix.device == self._devices.rank]
        changes = step(own, held)
        return self._scattered(used, held, changes)

    def _gathered(self, used: Sequence[Matrix], optimizers: Sequence[Optimizer]) -> dict[int, Held]:
        """Whole copies of the matrices that this device owns."""
        states = {matrix.number: optimizers[matrix.optimizer].state.get(matrix.parameter, {}) for matrix in used}
        names = {
            number: [name for name, value in state.items() if is_per_element(value)] for number, state in states.items()
        }
        owned = [[matrix for matrix in used if matrix.device == device] for device in range(self._devices.count)]

        def parts(matrix: Matrix) -> list[Tensor]:
            assert matrix.parameter.grad is not None, "it is used"
            state = states[matrix.number]
            return [matrix.parameter, matrix.parameter.grad, *(state[name] for name in names[matrix.number])]

        def forms(device: int, owner: int) -> list[Form]:
            return [self._cut(form(part), matrix, device) for matrix in owned[owner] for part in parts(matrix)]

        # No device has more rows than the first.
        size = max(size_of(forms(0, owner)) for owner in range(self._devices.count))
        rows = self._swap([[part for matrix in own for part in parts(matrix)] for own in owned], size, used)
        own = owned[self._devices.rank]
        slices = [tensors_in(row, forms(device, self._devices.rank)) for device, row in enumerate(rows)]
        whole_tensors = iter([torch.cat(group) for group in zip(*slices, strict=True)])
        copies = {}
        for matrix in own:
            value, gradient = next(whole_tensors), next(whole_tensors)
            gathered = {name: next(whole_tensors) for name in names[matrix.number]}
            state = {
                name: gathered[name] if name in gathered else copied(kept)
                for name, kept in states[matrix.number].items()
            }
            copies[matrix.number] = Held(matrix.group, value, gradient, state)
        return copies

    def _scattered(
        self, used: Sequence[Matrix], held: Mapping[int, Held], changes: dict[int, Changes]
    ) -> tuple[Worked, dict[int, Changes]]:
        """The slices of this device, of the values and states that the owners have computed."""
        matrices = {matrix.number: matrix for matrix in used}
        cut, rest = _apart(held, matrices)
        skeletons, tensors = zip(flatten(cut), flatten(rest), strict=True)
        kinds = [list(by_name.values()) for by_name in tensors]
        numbers = [[number, 1 + sum(map(is_per_element, copy.state.values()))] for number, copy in held.items()]
        replies = self._announcements.exchange(
            [numbers, *skeletons, *map(list, tensors), *map(forms_of, kinds), [[*pair] for pair in _rows(changes)]]
        )
        announced = [value_of(_AnnouncedSlices, reply, "what another device has worked out") for reply in replies]

        def forms(owner: int, device: int) -> list[Form]:
            counts, _, _, _, _, sliced, whole, _ = announced[owner]
            value_matrices = [matrices[number] for number, count in counts for _ in range(count)]
            return [
                *(
                    self._cut(sliced_form, matrix, device)
                    for sliced_form, matrix in zip(sliced, value_matrices, strict=True)
                ),
                *whole,
            ]

        size = max(size_of(forms(owner, 0)) for owner in range(self._devices.count))
        value_matrices = [matrices[number] for number, count in numbers for _ in range(count)]
        sent = [
            [
                *(self._rows(value, matrix, device) for value, matrix in zip(kinds[0], value_matrices, strict=True)),
                *kinds[1],
            ]
            for device in range(self._devices.count)
        ]
        received = self._swap(sent, size, used)
        worked: Worked = {}
        changed_groups: dict[int, Changes] = {}
        for owner, row in enumerate(received):
            _, sliced, whole, sliced_names, whole_names, _, _, changed = announced[owner]
            values = tensors_in(row, forms(owner, self._devices.rank))
            sliced_values = unflatten(sliced, dict(zip(sliced_names, values[: len(sliced_names)], strict=True)))
            whole_values = unflatten(whole, dict(zip(whole_names, values[len(sliced_names) :], strict=True)))
            for (number, value, state), (_, order, whole_state) in zip(sliced_values, whole_values, strict=True):
                worked[number] = value, {name: state[name] if name in state else whole_state[name] for name in order}
            for number, group, settings in changed:
                changed_groups.setdefault(number, {})[group] = settings
        return worked, changed_groups

    def _swap(self, tensors: Sequence[Sequence[Tensor]], size: int, used: Sequence[Matrix]) -> Sequence[Tensor]:
        """Send each device its tensors, in a row of bytes, and return the row that came from each."""
        if not size:
            return [torch.empty(0, dtype=torch.uint8)] * self._devices.count
        sent = torch.stack([row_of(row, size, used[0].parameter.device) for row in tensors])
        received = torch.empty_like(sent)
        self._devices.exchange.swap(received, sent)
        return list(received)

    def _cut(self, whole: Form, matrix: Matrix, device: int) -> Form:
        """The form of a device's slice of a tensor that is cut like a matrix."""
        name, shape = whole
        return name, [len(self._range(matrix, device)), *shape[1:]]

    def _rows(self, value: Tensor, matrix: Matrix, device: int) -> Tensor:
        rows = self._range(matrix, device)
        return value[rows.start : rows.stop]

    def _range(self, matrix: Matrix, device: int) -> range:
        rows = matrix.shape[0]
        most_rows = -(-rows // self._devices.count)
        return range(min(rows, device * most_rows), min(rows, (device + 1) * most_rows))


_AnnouncedSlices = tuple[
    list[tuple[int, int]], Any, Any, list[str], list[str], list[Form], list[Form], list[tuple[int, int, dict[str, Any]]]
]


def _apart(held: Mapping[int, Held], matrices: Mapping[int, Matrix]) -> tuple[list[Any], list[Any]]:
    """The value and state of each matrix: what is cut into slices, and what is whole on each device."""
    cut, rest = [], []
    for number, copy in held.items():
        for name, value in copy.state.items():
            if is_per_element(value) and tuple(value.shape) != matrices[number].shape:
                raise ModelError(
                    f"an optimizer keeps {name} of the shape {list(value.shape)} for a parameter of the shape "
                    f"{list(matrices[number].shape)}, of which each device has a slice: use one device per worker"
                )
        cut.append([number, copy.value, {name: value for name, value in copy.state.items() if is_per_element(value)}])
        whole = {name: value for name, value in copy.state.items() if not is_per_element(value)}
        rest.append([number, list(copy.state), whole])
    return cut, rest


def _rows(changes: Mapping[int, Changes]) -> list[tuple[int, int, dict[str, Any]]]:
    return [(number, group, values) for number, groups in changes.items() for group, values in groups.items()]


class OwnedUpdate(Update):
    """Has each matrix's update worked out by its owner, before anything changes; then all workers make it.

    The owner runs the optimizer's own step on a copy of the whole matrix, so the bits are those of an update that every
    worker makes by itself. No worker keeps anything for others between two steps: workers may be lost at any moment.

    Args:
        devices: the devices of this worker. If parameters lie in slices, devices share the work, and owners gather
            slices.
        workers: the workers that share the work; None if each does all of it.
    """

    def __init__(self, prepared: Prepared, devices: Devices, workers: Workers | None) -> None:
        self._optimizers, self._workers, self._devices = prepared.optimizers, workers, devices
        crew, rank = (workers.world_size, workers.rank) if workers is not None else (1, 0)
        self._matrices, self._rank = matrices_of(prepared.optimizers, crew, devices), rank
        self._slices = (
            MatrixSlices(devices)
            if any(held_whole(matrix.parameter) is not None for matrix in self._matrices)
            else None
        )
        self._announcements = None if workers is None else Announcements(workers.gather_json)
        self._worked: Worked = {}
        self._changes: dict[int, Changes] = {}
        self._is_worked_out = False

    @torch.no_grad()
    def work_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Work out the new values and states of all matrices. Collective; changes nothing.

        Raises:
            ModelError: an optimizer of slices has hooks, or keeps a tensor that cannot be in slices.
        """
        self._is_worked_out = False
        numbers = {number for number, own in enumerate(self._optimizers) if any(own is called for called in optimizers)}
        matrices = [matrix for matrix in self._matrices if matrix.optimizer in numbers]
        if not matrices:
            return
        why = next(filter(None, (_why_not(self._optimizers[number]) for number in sorted(numbers))), "")
        if why and self._slices is not None:
            raise ModelError(f"with run.fully_shard, {why}")
        own = [matrix for matrix in matrices if matrix.worker == self._rank]
        # With hooks on any worker, all workers run the optimizers' own steps instead.
        self._worked, self._changes = ({}, {}) if why else self._worked_out(own)
        self._is_worked_out = self._exchange({matrix.number for matrix in matrices}, is_able=not why)

    @torch.no_grad()
    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the update: set matrices to what was worked out, and run the other optimizers' own steps."""
        for number, optimizer in enumerate(self._optimizers):
            if not any(optimizer is called for called in optimizers):
                continue
            own = [matrix for matrix in self._matrices if matrix.optimizer == number] if self._is_worked_out else []
            if not own:
                optimizer.step()
                continue
            for matrix in own:
                if matrix.number in self._worked:
                    value, state = self._worked[matrix.number]
                    matrix.parameter.copy_(value)
                    optimizer.state[matrix.parameter] = merged(optimizer.state[matrix.parameter], state)
            changes = self._changes.get(number, {})
            set_hyperparameters(optimizer, [changes.get(group, {}) for group in range(len(optimizer.param_groups))])
            quiet_schedulers([optimizer])
        self._worked, self._changes, self._is_worked_out = {}, {}, False

    def _worked_out(self, own: Sequence[Matrix]) -> tuple[Worked, dict[int, Changes]]:
        if self._slices is not None:
            return self._slices.worked_out(own, self._optimizers, self._try)
        held = {
            matrix.number: Held.copied(
                matrix.group, matrix.parameter, self._optimizers[matrix.optimizer].state.get(matrix.parameter, {})
            )
            for matrix in own
            if matrix.parameter.grad is not None
        }
        changes = self._try(own, held)
        return {number: (copy.value, copy.state) for number, copy in held.items()}, changes

    def _try(self, own: Sequence[Matrix], held: Mapping[int, Held]) -> dict[int, Changes]:
        """Make the optimizers' steps on copies of the tensors that this worker, or device, owns."""
        changes = {}
        for number in sorted({matrix.optimizer for matrix in own}):
            matrices = [matrix for matrix in own if matrix.optimizer == number]
            idle: dict[int, list[Tensor]] = {}
            for matrix in matrices:
                if matrix.number not in held:
                    idle.setdefault(matrix.group, []).append(matrix.parameter)
            copies = [held[matrix.number] for matrix in matrices if matrix.number in held]
            changes[number] = try_step(self._optimizers[number], copies, idle)
        return changes

    def _exchange(self, expected: set[int], *, is_able: bool) -> bool:
        """Send all workers what was worked out. Collective. Return whether all workers were able to work it out."""
        if self._workers is None or self._announcements is None or self._workers.world_size == 1:
            return is_able
        worked = [[number, value, state] for number, (value, state) in sorted(self._worked.items())]
        skeleton, tensors = flatten(worked)
        own_tensors = list(tensors.values())
        changes = [
            [number, group, values] for number, groups in self._changes.items() for group, values in groups.items()
        ]
        replies = self._announcements.exchange([is_able, skeleton, list(tensors), forms_of(own_tensors), changes])
        announced = [value_of(_Announced, reply, "what another worker has worked out") for reply in replies]
        if not all(able for able, *_ in announced):
            return False
        size = max(size_of(forms) for _, _, _, forms, _ in announced)
        device = next(iter(own_tensors), torch.empty(0)).device
        rows = self._workers.transport.all_gather(row_of(own_tensors, size, device))
        for rank, (_, skeleton, names, forms, changes) in enumerate(announced):
            if rank == self._rank:
                continue
            update = unflatten(skeleton, dict(zip(names, tensors_in(rows[rank], forms), strict=True)))
            for number, value, state in value_of(list[tuple[int, Tensor, dict[str, Any]]], update, "an update"):
                if number in expected:
                    self._worked[number] = value, state
            for number, group, values in changes:
                self._changes.setdefault(number, {})[group] = values
        return True


_Announced = tuple[bool, Any, list[str], list[Form], list[tuple[int, int, dict[str, Any]]]]


def whole_update(prepared: Prepared, workers: Workers, execution: Execution) -> Update:
    """The update of a job's workers: whole matrices have owners if that saves time."""
    matrices = [
        (optimizer, parameter)
        for optimizer in prepared.optimizers
        if cost_of(optimizer) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    is_sliced = any(held_whole(parameter) is not None for _, parameter in matrices)
    multiplications = sum(products(tuple(parameter.shape)) for _, parameter in matrices)
    shares = workers.world_size > 1 and (is_sliced or multiplications >= execution.shared_from)
    if not matrices or not (is_sliced or shares):
        return Update()
    if _has_shared_parameters(prepared.optimizers):
        if is_sliced:
            raise ModelError("a parameter in slices belongs to several optimizers, one of which updates whole matrices")
        return Update()
    return OwnedUpdate(prepared, workers.devices, workers if shares else None)


def lone_update(prepared: Prepared, devices: Devices) -> Update:
    """The update that a worker makes without others."""
    is_sliced = any(held_whole(parameter) is not None for parameter in prepared.parameters.values())
    return OwnedUpdate(prepared, devices, None) if is_sliced else Update()


def _has_shared_parameters(optimizers: Sequence[Optimizer]) -> bool:
    owned = [id(tensor) for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]]
    return len(owned) != len(set(owned))


def _why_not(optimizer: Optimizer) -> str:
    if cost_of(optimizer) is None or not (is_hooked(optimizer) or has_own_step(optimizer)):
        return ""
    return (
        f"{type(optimizer).__name__}.step can have no hooks and cannot be replaced: each device updates only its own "
        f"matrices, and sees nothing of the others"
    )
