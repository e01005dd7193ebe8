"""Matrices that lie in slices on the devices of a worker: gathered at their owners, and cut up again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.codec import flatten, unflatten
from unisono.errors import ModelError
from unisono.received import value_of
from unisono.train.group.devices import Devices
from unisono.train.step.matrices import Matrix, Worked
from unisono.train.step.tensor_trees import Announcements, Form, form, forms_of, row_of, size_of, tensors_in
from unisono.train.step.trial_step import Changes, Held, copied

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
        everybody = [value_of(_Announced, one, "what another device has worked out") for one in told]

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


_Announced = tuple[
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
