"""A Keras model on a run: prepared for what it is now, and what checkpoints and other workers get of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.layout import form_of
from unisono.errors import CheckpointError
from unisono.integrations.kept_attributes import free_name, put
from unisono.integrations.keras.data import KerasData
from unisono.integrations.keras.fitting import Fitting
from unisono.integrations.keras.kept import own_optimizer, require_kept, scales_loss
from unisono.integrations.keras.variables import is_built, require_sums, shared_state
from unisono.integrations.loss_scaler import require_scaling
from unisono.integrations.refused import refused
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.run import Run
from unisono.train.state.registered import kept


class KerasUpdate(torch.optim.Optimizer):
    """A torch optimizer whose step is that of a model's Keras optimizer.

    Its learning rate is a factor on the one that Keras has: policies change it.

    Args:
        model: the model, built; compiled, if it is to be trained.
    """

    def __init__(self, model: Any) -> None:
        super().__init__([variable.value for variable in model.trainable_variables], {"lr": 1.0})
        self._model = model

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # there is no closure
        """Let the Keras optimizer clip, decay and apply what lies in ``parameter.grad``."""
        trained = [(one.value.grad, one) for one in self._model.trainable_variables if one.value.grad is not None]
        optimizer = own_optimizer(self._model)  # the run has unscaled gradients, and skips steps
        with _scaled(optimizer, float(self.param_groups[0]["lr"])):
            optimizer.apply([gradient for gradient, _ in trained], [variable for _, variable in trained])


@contextmanager
def _scaled(optimizer: Any, factor: float) -> Iterator[None]:
    if factor == 1.0:
        yield
        return
    usual = optimizer._get_current_learning_rate
    with put(optimizer, "_get_current_learning_rate", lambda: usual() * factor):
        yield


class VariablesState:
    """The values of Keras' variables, as checkpoints and other workers get them.

    Args:
        owner: what has them, for messages.
        variables: a function that returns them, always in the same order.
    """

    def __init__(self, owner: str, variables: Callable[[], Sequence[Any]]) -> None:
        self._owner, self._variables = owner, variables

    def state_dict(self) -> dict[str, Tensor]:
        """The values by number and name."""
        return {f"{number} {one.path}": one.value.detach().clone() for number, one in enumerate(self._variables())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set all of them.

        Raises:
            CheckpointError: it is the state of others. Then nothing has changed.
        """
        variables = self._variables()
        if len(state) != len(variables):
            raise CheckpointError(f"the Keras {self._owner} has {len(variables)} variables, and its state {len(state)}")
        for variable, (name, value) in zip(variables, state.items(), strict=True):
            if form_of(value) != form_of(variable.value):
                raise CheckpointError(
                    refused("keras.unlike-variable", name=name, owner=self._owner, path=variable.path)
                )
        for variable, value in zip(variables, state.values(), strict=True):
            variable.assign(value)


class OnRun:
    """A Keras model on a run: its trainings, its evaluations and its optimizer.

    Args:
        model: the Keras model.
        run: the run.

    Attributes:
        update: the model's update; None as long as it is not prepared.
        evaluated: what metrics came to in each evaluation of the script so far, in their order.
        predicted: the outputs of each prediction of the script outside of trainings.
    """

    def __init__(self, model: Any, run: Run) -> None:
        self._model, self._run, self._name = model, run, ""
        self._optimizer = VariablesState("optimizer", lambda: model.optimizer.variables if model.optimizer else ())
        self._weights = VariablesState("model", lambda: model.variables)
        self._prepared_for: list[Any] = []
        self._prepared: Prepared | None = None
        self._begun: list[Fitting] = []
        self._awaited: dict[int, Mapping[str, Any]] = {}
        self.update: KerasUpdate | None = None
        self.evaluated: list[Tensor] = []
        self.predicted: list[Any] = []
        self._written = 0

    @property
    def count(self) -> int:
        """The number of trainings that have begun."""
        return len(self._begun)

    def get_ready(self, samples: KerasData, *, trains: bool = False) -> None:
        """Build the model, and prepare it unless that was done for what it is now.

        Args:
            samples: data by which it gets its shapes.
            trains: whether it is to be trained: then the run has to be prepared for it, and not for another model.
        """
        model, run = self._model, self._run
        require_kept(model)
        if trains and scales_loss(model):
            require_scaling(run, "a LossScaleOptimizer, which mixed_float16 brings along")
        if not is_built(model):
            first = samples.first()
            model._symbolic_build(data_batch=(*first, *[None] * (3 - len(first))))
        present = self._present()
        is_same = len(present) == len(self._prepared_for) and all(map(is_, present, self._prepared_for))
        if is_same and (self._is_prepared or not trains):
            return
        require_sums(model)
        if not self._prepared_for:
            self._name = free_name(run, "keras")
            run.register(self._name, self)
        self.update = KerasUpdate(model)
        run.prepare(model, self.update, state=shared_state(model))
        self._prepared_for, self._prepared = self._present(), run.inside.trained.prepared

    @property
    def _is_prepared(self) -> bool:
        """Whether the run keeps this model, and no other one that was prepared since."""
        return self._prepared is self._run.inside.trained.prepared

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
        found: Tensor | None = self._behind("evaluated", len(self.evaluated))
        return found

    def predict(self, act: Callable[[], Any]) -> Any:
        """The outputs of a prediction: those of that time, if the run has it behind itself."""
        if self._run.inside.steps.under_way is not None:  # a run that resumes does not come here again
            return act()
        known = self._behind("predicted", len(self.predicted))
        self.predicted.append(act() if known is None else known)
        return self.predicted[-1]

    def _behind(self, kind: str, number: int) -> Any:
        found = self._restored().get(kind, [])
        return found[number] if number < len(found) else None

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
        return {
            "weights": {} if self._is_prepared else self._weights.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "fits": [one.state() for one in self._begun],
            "evaluated": list(self.evaluated),
            "predicted": list(self.predicted),
            "written": self._written,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of it; what is of a training that this worker has yet to begin waits for that.

        Raises:
            CheckpointError: it is of another model or optimizer, or of other callbacks.
        """
        if state["weights"]:
            self._weights.load_state_dict(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.evaluated, self._written = list(state["evaluated"]), state["written"]
        self.predicted = list(state["predicted"])
        for number, one in enumerate(state["fits"]):
            if number < len(self._begun):
                self._go_on(self._begun[number], one)
            else:
                self._awaited[number] = one

    def write(self, act: Callable[[], None]) -> None:
        """Have the main worker write a file, while the others wait. A run that resumes behind it leaves it alone."""
        if self._run.inside.ending.is_closed:  # each worker runs the last lines by itself
            if self._run.is_main:
                act()
            return
        is_written = self._written < self._restored().get("written", 0)

        def together(workers: Workers) -> None:
            if workers.rank == 0 and not is_written:
                act()
            workers.barrier()

        self._run.together(together)
        self._written += 1

    @staticmethod
    def _go_on(fit: Fitting, state: Mapping[str, Any]) -> None:
        fit.load(state)
        fit.is_here = True
