"""What a worker needs that joins a training, and a run that resumes in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from unisono.errors import CheckpointError
from unisono.integrations.kept_attributes import KeptAttributes
from unisono.integrations.transformers.main_worker import MainWorker, decides

OF_THIS_WORKER = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
"""Fields of ``TrainerState`` that say something of this worker, or are made anew when it saves."""

SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")
"""Numbers that the trainer keeps of a training, besides its state."""


class KeptState:
    """A trainer's state, as checkpoints and other workers get it: counters, history, decisions, scheduler, callbacks.

    Args:
        trainer: the trainer.

    Attributes:
        has_evaluated: whether the model was evaluated before the first step.
        has_schedulers: whether schedulers are part of it.
    """

    has_schedulers = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._callbacks: list[KeptAttributes] = []
        self._awaited: Mapping[str, Any] | None = None
        self._is_under_way = False
        self.has_evaluated = False

    def begin(self) -> None:
        """A training begins: everything is as it was made."""
        self._awaited, self._is_under_way, self.has_evaluated = None, False, False
        callbacks = self._trainer.callback_handler.callbacks
        self._callbacks = [KeptAttributes(one) for one in callbacks if decides(one) and not isinstance(one, MainWorker)]
        for one in self._callbacks:
            one.warn("transformers")

    def go_on(self) -> None:
        """The loop is about to go on where others are: what it has set up since is set once more."""
        state, self._awaited, self._is_under_way = self._awaited, None, True
        if state is not None:
            self._set(state)

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        trainer = self._trainer
        state = {one.name: getattr(trainer.state, one.name) for one in fields(trainer.state)}
        return {
            "state": {name: value for name, value in state.items() if name not in OF_THIS_WORKER},
            "control": dict(vars(trainer.control)),
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "sums": {name: getattr(trainer, name, 0) for name in SUMS},
            "operations": trainer.current_flos,
            "scheduler": None if trainer.lr_scheduler is None else trainer.lr_scheduler.state_dict(),
            "has evaluated": self.has_evaluated,
            "callbacks": [[type(one.thing).__name__, one.state()] for one in self._callbacks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of it.

        Raises:
            CheckpointError: it was with other callbacks.
        """
        here, there = [type(one.thing).__name__ for one in self._callbacks], [name for name, _ in state["callbacks"]]
        if here != there:
            raise CheckpointError(f"the trainer has the callbacks {here}, and its state is of {there}: use the same")
        if not self._is_under_way:
            self._awaited = state
        self._set(state)

    def _set(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        for name, value in state["control"].items():
            setattr(trainer.control, name, value)
        trainer._tr_loss = torch.tensor(state["loss"], device=trainer.args.device)
        for name, value in state["sums"].items():
            setattr(trainer, name, value)
        trainer.current_flos = state["operations"]
        if trainer.lr_scheduler is not None and state["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(dict(state["scheduler"]))
        self.has_evaluated = state["has evaluated"]
        for one, (_, attributes) in zip(self._callbacks, state["callbacks"], strict=True):
            one.load(attributes)
