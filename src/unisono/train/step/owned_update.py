"""The update of whole matrices: each has one owner, which works it out for all workers, or devices of a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.codec import flatten, unflatten
from unisono.errors import ModelError
from unisono.received import value_of
from unisono.train.config.run_config import Execution
from unisono.train.group.devices import Devices
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.slices import held_whole
from unisono.train.model.update import Update, has_own_step, is_hooked, set_hyperparameters, tell_schedulers
from unisono.train.model.whole_matrix import cost_of, products
from unisono.train.step.matrices import Matrix, Worked, matrices_of
from unisono.train.step.matrix_slices import MatrixSlices
from unisono.train.step.tensor_trees import Announcements, Form, forms_of, row_of, size_of, tensors_in
from unisono.train.step.trial_step import Changes, Held, merged, try_step


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
