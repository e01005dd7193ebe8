"""An optimizer's step on copies of some of its tensors: what it would make of them, while they stay as they are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from unisono.checkpoint.layout import form_of
from unisono.train.model.update import hyperparameters_of

Changes = dict[int, dict[str, Any]]
"""Of groups, by number: the settings that the step has changed, as JSON values."""

_OWN = ("step", "zero_grad", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(slots=True)
class Held:
    """A tensor that an optimizer updates, and what it goes by.

    Attributes:
        group: the number of its group.
        value: its value.
        gradient: its gradient.
        state: what the optimizer keeps of it, by name.
    """

    group: int
    value: Tensor
    gradient: Tensor
    state: dict[str, Any]

    @classmethod
    def copied(cls, group: int, parameter: Tensor, state: Mapping[str, Any]) -> Held:
        """A copy of a parameter and of its state. Its gradient is its own."""
        assert parameter.grad is not None, "there is something to update it with"
        return cls(group, parameter.detach().clone(), parameter.grad, copied(dict(state)))


def copied(state: Any) -> Any:
    """State with tensors of its own, in lists and dicts of its own."""
    return tree_map(lambda value: value.detach().clone() if isinstance(value, Tensor) else value, state)


def merged(held: Any, found: Any) -> Any:
    """State as it was found, in the tensors and dicts that there are: whoever holds these sees it."""
    if isinstance(found, Tensor):
        if isinstance(held, Tensor) and form_of(held) == form_of(found):
            return held.copy_(found)
        return found.detach().clone()
    if isinstance(found, dict):
        if not isinstance(held, dict):
            return {name: merged(None, value) for name, value in found.items()}
        for name in [name for name in held if name not in found]:
            del held[name]
        held.update({name: merged(held.get(name), value) for name, value in found.items()})
        return held
    if isinstance(found, list | tuple):
        olds = held if isinstance(held, list | tuple) and len(held) == len(found) else [None] * len(found)
        return type(found)([merged(old, value) for old, value in zip(olds, found, strict=True)])
    return found


def try_step(optimizer: Optimizer, tensors: Sequence[Held], idle: Mapping[int, Sequence[Tensor]]) -> Changes:
    """Have an optimizer update copies, in place. It stays as it is itself.

    Args:
        optimizer: the optimizer. Its step is that of its class.
        tensors: the copies.
        idle: parameters without gradients that it is shown as well, by the number of their group.

    Returns:
        what it has changed of the settings of groups in which there is something.
    """
    copy = type(optimizer).__new__(type(optimizer))
    vars(copy).update({name: value for name, value in vars(optimizer).items() if name not in _OWN})
    copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    copy.state = defaultdict(dict)
    members: dict[int, list[Tensor]] = {group: list(listed) for group, listed in idle.items()}
    for one in tensors:
        parameter = nn.Parameter(one.value)
        parameter.grad, copy.state[parameter] = one.gradient, one.state
        members.setdefault(one.group, []).append(parameter)
        one.value = parameter
    copy.param_groups = [{**optimizer.param_groups[group], "params": members[group]} for group in sorted(members)]
    numbered = dict(zip(sorted(members), hyperparameters_of(copy), strict=True))
    with torch.enable_grad():  # as scripts call it
        copy.step()
    for one in tensors:
        one.value, one.state = one.value.detach(), copy.state[one.value]
    after = dict(zip(sorted(members), hyperparameters_of(copy), strict=True))
    changed = {
        group: {name: value for name, value in values.items() if numbered[group].get(name, _ABSENT) != value}
        for group, values in after.items()
    }
    return {group: values for group, values in changed.items() if values}


_ABSENT = object()
