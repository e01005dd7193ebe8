"""Optimizers of a model whose stages lie on the devices of a worker: each device updates what it holds."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from unisono.errors import ModelError
from unisono.train.model.staging import staging_of

_groups: weakref.WeakKeyDictionary[Optimizer, list[list[str]]] = weakref.WeakKeyDictionary()


def groups_of(optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of all stages that an optimizer was given, by its groups."""
    return _groups[optimizer]


def update_own(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Have optimizers update what this device holds, if models lie in stages.

    Raises:
        ModelError: something is to be trained that belongs to no stage.
    """
    if staging_of(modules) is None:
        return
    if len(modules) > 1:
        raise ModelError(
            "run.prepare was given a model in stages and others besides: put all of them into one module, in the order "
            "of their calls, and give that to run.pipeline"
        )
    names = {id(parameter): name for name, parameter in modules[0].named_parameters()}
    for optimizer in optimizers:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        if any(id(each) not in names for each in held):
            raise ModelError(
                "the optimizer holds a parameter that belongs to no stage: make it a part of the model before "
                "run.pipeline, and the optimizer after it"
            )
        if optimizer not in _groups or any(each.is_meta for each in held):
            _groups[optimizer] = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if not each.is_meta]
        for each in [each for each in optimizer.state if each.is_meta]:
            del optimizer.state[each]
