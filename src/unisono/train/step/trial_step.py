"""An optimizer's step on copies of some of its tensors, which shows the result and leaves the tensors as they are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from unisono.checkpoint.tensor_bytes import form_of
from unisono.train.model.update import hyperparameters_of

Changes = dict[int, dict[str, Any]]
"""The settings that the step has changed, as JSON values, by the number of the group."""

_OWN = ("step", "zero_grad", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes that a copy does not get from its optimizer: methods that were replaced or wrapped, and hooks."""


@dataclass(slots=True)
class Held:
    """A tensor that an optimizer updates, with its gradient and state."""

    group: int
    value: Tensor
    gradient: Tensor
    state: dict[str, Any]

    @classmethod
    def copied(cls, group: int, parameter: Tensor, state: Mapping[str, Any]) -> Held:
        """A copy of a parameter and of its state. The gradient is the parameter's own, not a copy."""
        assert parameter.grad is not None, "there is something to update it with"
        return cls(group, parameter.detach().clone(), parameter.grad, copied(dict(state)))


def copied(state: Any) -> Any:
    """A copy of state in lists and dicts, with copies of all tensors."""
    return tree_map(lambda value: value.detach().clone() if isinstance(value, Tensor) else value, state)


def merged(held: Any, new: Any) -> Any:
    """State with new values, in the tensors and dicts that hold the old ones: other holders see the new values."""
    if isinstance(new, Tensor):
        if isinstance(held, Tensor) and form_of(held) == form_of(new):
            return held.copy_(new)
        return new.detach().clone()
    if isinstance(new, dict):
        if not isinstance(held, dict):
            return {name: merged(None, value) for name, value in new.items()}
        for name in [name for name in held if name not in new]:
            del held[name]
        held.update({name: merged(held.get(name), value) for name, value in new.items()})
        return held
    if isinstance(new, list | tuple):
        olds = held if isinstance(held, list | tuple) and len(held) == len(new) else [None] * len(new)
        return type(new)([merged(old, value) for old, value in zip(olds, new, strict=True)])
    return new


def try_step(optimizer: Optimizer, tensors: Sequence[Held], idle: Mapping[int, Sequence[Tensor]]) -> Changes:
    """Have an optimizer update copies, in place. The optimizer itself is not changed.

    The step is that of its class. ``idle`` are parameters without gradients that it sees as well, by the number of
    their group. Return the settings that it has changed, of groups with a copy or an idle parameter.
    """
    copy = type(optimizer).__new__(type(optimizer))
    vars(copy).update({name: value for name, value in vars(optimizer).items() if name not in _OWN})
    copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    copy.state = defaultdict(dict)
    members: dict[int, list[Tensor]] = {group: list(parameters) for group, parameters in idle.items()}
    for tensor in tensors:
        parameter = nn.Parameter(tensor.value)
        parameter.grad, copy.state[parameter] = tensor.gradient, tensor.state
        members.setdefault(tensor.group, []).append(parameter)
        tensor.value = parameter
    copy.param_groups = [{**optimizer.param_groups[group], "params": members[group]} for group in sorted(members)]
    before = dict(zip(sorted(members), hyperparameters_of(copy), strict=True))
    with torch.enable_grad():  # scripts call step with gradients enabled
        copy.step()
    for tensor in tensors:
        tensor.value, tensor.state = tensor.value.detach(), copy.state[tensor.value]
    after = dict(zip(sorted(members), hyperparameters_of(copy), strict=True))
    changed = {
        group: {name: value for name, value in values.items() if before[group].get(name, _ABSENT) != value}
        for group, values in after.items()
    }
    return {group: values for group, values in changed.items() if values}


_ABSENT = object()
