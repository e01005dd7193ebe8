"""A Keras model on a run: prepared for what it is now, and what checkpoints and other workers get of it."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

from torch import Tensor

from unisono.integrations.keras.data import KerasData
from unisono.integrations.keras.fitting import Fitting
from unisono.integrations.keras.kept import require_kept
from unisono.integrations.keras.update import KerasUpdate, OptimizerState
from unisono.integrations.keras.variables import is_built, require_sums, shared_state
from unisono.integrations.names import free_name
from unisono.train.run import Run
from unisono.train.state.registered import kept


class OnRun:
    """A Keras model on a run: its trainings, its evaluations and its optimizer.

    Args:
        model: the Keras model.
        run: the run.

    Attributes:
        update: the model's update; None as long as it is not prepared.
        evaluated: what metrics came to in each evaluation of the script so far, in their order.
    """

    def __init__(self, model: Any, run: Run) -> None:
        self._model, self._run, self._name = model, run, ""
        self._optimizer = OptimizerState(model)
        self._prepared_for: list[Any] = []
        self._begun: list[Fitting] = []
        self._awaited: dict[int, Mapping[str, Any]] = {}
        self.update: KerasUpdate | None = None
        self.evaluated: list[Tensor] = []

    @property
    def count(self) -> int:
        """The number of trainings that have begun."""
        return len(self._begun)

    def get_ready(self, samples: KerasData) -> None:
        """Build the model, and prepare it unless that was done for what it is now."""
        model, run = self._model, self._run
        require_kept(model)
        if not is_built(model):
            first = samples.first()
            model._symbolic_build(data_batch=(*first, *[None] * (3 - len(first))))
        present = self._present()
        if len(present) == len(self._prepared_for) and all(map(is_, present, self._prepared_for)):
            return
        require_sums(model)
        if not self._prepared_for:
            self._name = free_name(run, "keras")
            run.register(self._name, self)
        self.update = KerasUpdate(model)
        run.prepare(model, self.update, state=shared_state(model))
        self._prepared_for = self._present()

    def _present(self) -> list[Any]:
        """What the run is prepared for: it has to be told of others."""
        model = self._model
        return [
            model.optimizer,
            *model.trainable_variables,
            *(variable for variable, _ in shared_state(model).values()),
        ]

    def known(self) -> Tensor | None:
        """What the metrics came to in the coming evaluation, if the run has it behind itself."""
        rows, number = self._restored().get("evaluated", []), len(self.evaluated)
        return rows[number] if number < len(rows) else None

    def _restored(self) -> Mapping[str, Any]:
        restored = self._run.inside.trained.restored
        return {} if restored is None else kept(restored, "registered").get(self._name, {})

    def begin(self, fit: Fitting) -> None:
        """One more begins."""
        fit.begin()
        number = len(self._begun)
        self._begun.append(fit)
        if (state := self._awaited.pop(number, None)) is not None:
            self._go_on(fit, state)

    def end(self) -> Any:
        """The newest training is over.

        Returns:
            its history, also if this worker has not taken part in it.
        """
        fit, number = self._begun[-1], len(self._begun) - 1
        if not fit.knows and number < len(fits := self._restored().get("fits", [])):
            fit.load(fits[number])
        outline = self._run.together(lambda workers: workers.broadcast(fit.outline(), 0))
        if not fit.knows:  # this worker joins, and the others have done it
            fit.load(outline)
        return fit.end()

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        fits = [one.state() for one in self._begun]
        return {"optimizer": self._optimizer.state_dict(), "fits": fits, "evaluated": list(self.evaluated)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of it; what is of a training that this worker has yet to begin waits for that.

        Raises:
            CheckpointError: it is of another optimizer, or of other callbacks.
        """
        self._optimizer.load_state_dict(state["optimizer"])
        self.evaluated = list(state["evaluated"])
        for number, one in enumerate(state["fits"]):
            if number < len(self._begun):
                self._go_on(self._begun[number], one)
            else:
                self._awaited[number] = one

    @staticmethod
    def _go_on(fit: Fitting, state: Mapping[str, Any]) -> None:
        fit.load(state)
        fit.is_here = True
