"""What optimizers are set to, such as their learning rates: it changes once for each step, not for each shard."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unisono.errors import JobError
from unisono.train.run import Run


class SettingsWatch:
    """Finds settings that a body changes in several turns of a step: how many turns there are depends on the workers.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: list[dict[str, Any]] = []
        self._has_changed = False

    def step_begins(self) -> None:
        """The body has made no turn of a step."""
        self._has_changed = False

    def turn_begins(self) -> None:
        """The body begins a turn."""
        self._before = self._present()

    def turn_ends(self) -> None:
        """The body has come to its end.

        Raises:
            JobError: it has changed settings, and has done so before in this step.
        """
        present = self._present()
        if present == self._before:
            return
        if self._has_changed:
            names = {
                name
                for one, other in zip(self._before, present, strict=False)
                for name in one
                if one[name] != other.get(name)
            }
            raise JobError(
                f"the body of a training loop has changed {', '.join(sorted(names))} of an optimizer in two turns of "
                f"one step, and each worker has another number of turns: give the scheduler to accelerator.prepare, "
                f"and change settings by hand where accelerator.sync_gradients is true"
            )
        self._has_changed = True

    def _present(self) -> list[dict[str, Any]]:
        optimizers = self._run.inside.trained.require_prepared().optimizers
        return [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
