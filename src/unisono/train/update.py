"""The update: what optimizers do with the step's gradient."""

from torch import optim
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

READERS: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
)
"""Optimizers that read gradients and do not change them."""


def may_change_gradients(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer, or a hook of it, might change gradients in place."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return type(optimizer) not in READERS or any(hooks)
