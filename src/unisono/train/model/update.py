"""The update: what optimizers do with the step's gradient."""

from collections.abc import Sequence

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
"""Optimizers that go element by element, and read gradients without changing them."""


def may_change_gradients(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer, or a hook of it, might change gradients in place."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return type(optimizer) not in READERS or any(hooks)


def tell_schedulers(optimizers: Sequence[Optimizer]) -> None:
    """Their updates are made elsewhere: without this, learning-rate schedulers warn that there was none."""
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]


class Update:
    """Every worker updates all parameters."""

    bytes_shared = 0

    def begin(self) -> None:
        """Nothing can have happened to them."""

    def accept(self) -> None:
        """They may change at any time."""

    def require_whole(self) -> None:
        """They always are."""

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Run the optimizers."""
        for optimizer in optimizers:
            optimizer.step()
