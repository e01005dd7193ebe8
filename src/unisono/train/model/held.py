"""Who trains what: the parameters that optimizers hold, of modules and besides, and those that none holds."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import ModelError
from unisono.train.model.slices import slice_of


def held_by(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """All parameters of optimizers, in their order."""
    return [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]


def trained_by(optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    """The ids of those that want a gradient."""
    return tuple(id(parameter) for parameter in held_by(optimizers) if parameter.requires_grad)


OUTSIDE = re.compile(r"optimizer\d*\.group\d+\.\d+")
"""The names of what optimizers hold and no module does."""


def outside_of(known: Collection[int], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The parameters that are not known, by a name that follows from their place alone.

    Args:
        known: the ids of all that modules hold.
        optimizers: the optimizers.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizer{number if len(optimizers) > 1 else ''}"
        for group, settings in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(settings["params"]):
                if id(parameter) not in known:
                    found.setdefault(id(parameter), (f"{prefix}.group{group}.{place}", parameter))
    return dict(found.values())


def require_held(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that holds nothing of the modules, while one of these waits to be trained.

    Raises:
        ModelError: says what to write.
    """
    parameters = [(module, list(map(slice_of, module.parameters()))) for module in modules]
    own, held = {id(each) for _, listed in parameters for each in listed}, set(map(id, held_by(optimizers)))
    strangers = [one for one in optimizers if held_by([one]) and own.isdisjoint(map(id, held_by([one])))]
    waiting = [
        module
        for module, listed in parameters
        if any(each.requires_grad for each in listed) and held.isdisjoint(map(id, listed))
    ]
    if strangers and waiting:
        kind, model = type(strangers[0]).__name__, type(waiting[0]).__name__
        raise ModelError(
            f"the {kind} holds no parameter of the {model} that run.prepare was given, so that would never be trained: "
            f"was it made of a copy, or before the model was built anew? Make it of this one: "
            f"{kind}(model.parameters(), …). What is not to be trained is frozen before: model.requires_grad_(False)"
        )


def change_of(names: Mapping[int, str], before: Sequence[int], optimizers: Sequence[Optimizer]) -> str:
    """What was changed so that other parameters are trained now, and what to do.

    Args:
        names: the names of parameters by their ids.
        before: those that were trained before, as :func:`trained_by` gave them.
        optimizers: the optimizers.
    """
    now = trained_by(optimizers)
    first = next((each for each in (*before, *now) if each not in now or each not in before), 0)
    what = "frozen, or taken from its optimizer" if first in before else "unfrozen, or given to an optimizer"
    several = (
        "to train those of one of several optimizers in a call, leave requires_grad as it is, and name the optimizer: "
        "step.run(loss_fn, optimizer=…). Otherwise "
    )
    return (
        f"{names.get(first, 'a parameter')} was {what}: {several if len(optimizers) > 1 else ''}do that before it, or "
        f"call run.prepare again; in a framework's trainer, before a training of its own"
    )
