"""The warning for scripts that update weights by themselves, where other workers do so, too."""

from __future__ import annotations

import warnings

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.data.order import Order
from unisono.errors import UnisonoWarning
from unisono.plan.batches import Batches
from unisono.train.group.membership import Membership
from unisono.train.model.prepared import Prepared
from unisono.train.model.update import UpdateWatch
from unisono.train.step.listeners import Listener


class LoneUpdates(Listener):
    """Watches the steps of all optimizers until the first loop begins, so that none costs more while the run trains.

    Args:
        membership: the members of the job.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._prepared: Prepared | None = None
        self._stepped: str | None = None  # before anything was prepared
        self._is_told = False
        self._hook = register_optimizer_step_pre_hook(UpdateWatch(self._steps))

    def prepared(self, prepared: Prepared, step: int) -> None:
        """These optimizers are the run's; what was stepped before, the script has trained beforehand."""
        self._prepared = prepared

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """The script knows how to train."""
        self._hook.remove()

    def close(self) -> None:
        """The run ends: it may have trained nothing at all."""
        self._hook.remove()
        if self._prepared is None and self._stepped is not None:
            self._tell(f"this run ends without run.prepare, and {self._stepped}.step() was called by the script itself")

    def _steps(self, optimizer: Optimizer) -> None:
        if not self._is_among_others() or not _has_gradients(optimizer):
            return
        name = type(optimizer).__name__
        if self._prepared is None:
            self._stepped = name
        elif any(optimizer is one for one in self._prepared.optimizers):
            self._tell(f"{name}.step() is called by the script itself")

    def _is_among_others(self) -> bool:
        return self._membership.is_main and self._membership.workers.world_size > 1

    def _tell(self, what: str) -> None:
        if self._is_told:
            return
        self._is_told = True
        warnings.warn(
            f"{what}: each of the {self._membership.workers.world_size} workers updates its own weights with its own "
            f"gradients, so that they train apart. Give model and optimizer to run.prepare, write the loop as "
            f"`for step in run.steps(dataset, epochs)`, and call step.run(loss_fn) in it, which goes backward and "
            f"updates",
            UnisonoWarning,
            stacklevel=5,  # the line with the step: this, two of ours, and torch's before it
        )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
