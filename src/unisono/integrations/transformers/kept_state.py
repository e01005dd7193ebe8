"""What a worker needs that joins a training, and a run that resumes in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from transformers import TrainerCallback

from unisono.errors import CheckpointError
from unisono.integrations.kept_attributes import KeptAttributes
from unisono.train.run import Run


class MainWorker(TrainerCallback):  # type: ignore[misc]  # optional: it may be missing
    """Comes before all other callbacks, and tells them whether they are on the main worker now.

    Transformers' callbacks that write do so where the state says that this is the main process. One that becomes so in
    the middle of a training hears of its beginning.

    Args:
        run: the run.
        callbacks: the trainer's callbacks.
    """

    def __init__(self, run: Run, callbacks: Any) -> None:
        self._run, self._callbacks = run, callbacks
        self._has_begun: bool | None = None  # there, on the main worker; None outside of trainings

    def _hear(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        is_main = self._run.is_main
        state.is_world_process_zero = state.is_local_process_zero = is_main
        if self._has_begun is False and is_main:
            self._has_begun = True
            for one in writers(self._callbacks.callbacks):
                one.on_train_begin(args, state, control, **parts)

    on_epoch_begin = on_epoch_end = on_step_begin = on_step_end = on_pre_optimizer_step = on_optimizer_step = _hear
    on_evaluate = on_predict = on_prediction_step = on_save = on_log = on_push_begin = on_init_end = _hear

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The others hear of it next."""
        self._has_begun = self._run.is_main
        self._hear(args, state, control, **parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The training is over."""
        self._hear(args, state, control, **parts)
        self._has_begun = None


def writers(callbacks: Any) -> list[Any]:
    """Those of Transformers' own callbacks that write or show."""
    return [one for one in callbacks if type(one).__module__.startswith("transformers.") and not decides(one)]


def decides(callback: Any) -> bool:
    """Whether a callback keeps a state that decides something, as far as Transformers knows."""
    return hasattr(callback, "state") or not type(callback).__module__.startswith("transformers.")


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
