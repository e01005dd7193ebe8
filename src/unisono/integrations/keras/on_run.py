"""A Keras model on a run: its preparation, and its state for checkpoints and other workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import keras
import numpy as np
import torch
from keras.src.backend import compute_output_spec
from torch import Tensor

from unisono.checkpoint.tensor_bytes import form_of
from unisono.errors import CheckpointError, DataError
from unisono.integrations.kept import Trainings, are_same, put
from unisono.integrations.keras.data import KerasData
from unisono.integrations.keras.fitting import Fitting
from unisono.integrations.keras.generator import GeneratorBatches
from unisono.integrations.keras.shard_step import AddedLosses
from unisono.integrations.keras.variables import (
    is_built,
    own_optimizer,
    require_kept,
    require_sums,
    scales_loss,
    shared_state,
)
from unisono.integrations.kit import refused, require_scaling
from unisono.integrations.shard_state import ShardState
from unisono.received import parse_json
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.run import Run


class KerasUpdate(torch.optim.Optimizer):
    """A torch optimizer whose step is that of a model's Keras optimizer.

    Its learning rate is a factor on the one that Keras has: policies change it.

    Args:
        model: the model, built; compiled, if it is to be trained.

    Attributes:
        idle: a number that a frozen model is trained with, which has nothing else.
    """

    def __init__(self, model: Any) -> None:
        device = next((variable.value.device for variable in model.variables), torch.device("cpu"))
        self.idle = torch.zeros((), device=device, requires_grad=True)
        super().__init__([variable.value for variable in model.trainable_variables] or [self.idle], {"lr": 1.0})
        self._model = model

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # there is no closure
        """Let the Keras optimizer clip, decay and apply what lies in ``parameter.grad``."""
        trained = [
            (variable.value.grad, variable)
            for variable in self._model.trainable_variables
            if variable.value.grad is not None
        ]
        if not trained:
            return
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

    ``variables`` returns them, always in the same order.
    """

    def __init__(self, owner: str, variables: Callable[[], Sequence[Any]]) -> None:
        self._owner, self._variables = owner, variables

    def state_dict(self) -> dict[str, Tensor]:
        """The values by number and name."""
        return {
            f"{number} {variable.path}": variable.value.detach().clone()
            for number, variable in enumerate(self._variables())
        }

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


class Calls:
    """What calls of a script have returned, in their order: a run that resumes behind them makes none of them again.

    They are one text, since there may be many, and a state is read in each step.
    """

    def __init__(self) -> None:
        self.text, self.count = "", 0

    def known(self, text: str) -> Any:
        """What the coming call has returned, by a text of an earlier run; None if it has not come so far."""
        lines = text.splitlines()
        return parse_json(lines[self.count]) if self.count < len(lines) else None

    def set(self, number: int, value: Any) -> None:
        """Note what the call with a number returns, unless it is known: numbers and text in lists and dicts."""
        if number == self.count:
            self.text, self.count = f"{self.text}{json.dumps(value)}\n", self.count + 1

    def load(self, text: str) -> None:
        """Have these made."""
        self.text, self.count = text, text.count("\n")


def _digest(value: Any) -> int:
    leaves = keras.tree.flatten(value)
    arrays = [np.asarray(leaf.cpu() if isinstance(leaf, Tensor) else leaf) for leaf in leaves]
    return crc32(b"".join(array.tobytes() for array in arrays))


class OnRun:
    """A Keras model on a run: its trainings, its evaluations and its optimizer.

    Attributes:
        update: the model's update; None as long as it is not prepared.
        evaluated: what evaluations of the script came to: ``row``, the values of metrics' variables, ``logs``, results
            by name, and ``position``, that of a generator behind it.
        stepped: what calls of ``train_on_batch`` returned.
        predicted: the outputs of each prediction of the script outside of trainings, and where a generator stood then.
        is_whole: whether each worker evaluates all batches, since ``test_step`` keeps or returns more than metrics.
        kept: what ``train_step`` keeps in the model's attributes.
        added: the losses that layers add, of the model as it is prepared.
    """

    def __init__(self, model: Any, run: Run) -> None:
        self._model, self._run = model, run
        for part in ("optimizer", "_compile_loss", "_compile_metrics"):
            if not hasattr(model, part):  # it is not compiled, which prediction does not need
                setattr(model, part, None)
        self._optimizer = VariablesState("optimizer", lambda: model.optimizer.variables if model.optimizer else ())
        self._weights = VariablesState("model", lambda: model.variables)
        self._prepared_for: list[Any] = []
        self._prepared: Prepared | None = None
        self._fits = Trainings(run)
        self.update: KerasUpdate | None = None
        self.evaluated, self.stepped, self.is_whole = Calls(), Calls(), False
        self.predicted: list[Any] = []
        self._written = 0
        self.kept, self.added = ShardState(run, model, "model"), AddedLosses(model)

    @property
    def count(self) -> int:
        """The number of trainings that have begun."""
        return len(self._fits.begun)

    def get_ready(self, samples: KerasData, *, trains: bool = False, predicts: bool = False) -> None:
        """Build the model, and prepare it unless that was done for what it is now.

        If it ``trains``, the run has to be prepared for it, and not for another model. If it ``predicts``, its losses
        and metrics are not needed. ``samples`` give it its shapes.
        """
        model, run = self._model, self._run
        require_kept(model)
        if trains and scales_loss(model):
            require_scaling(run, "a LossScaleOptimizer, which mixed_float16 brings along")
        if not is_built(model, alone=predicts):
            first = samples.first()
            if predicts:
                compute_output_spec(model, first[0])
            else:
                model._symbolic_build(data_batch=(*first, *[None] * (3 - len(first))))
        if are_same(self._present(), self._prepared_for) and (self._is_prepared or not trains):
            return
        require_sums(model)
        self._fits.register("keras", self)
        self.update, self.added = KerasUpdate(model), AddedLosses(model)
        run.prepare(model, self.update, state=shared_state(model) | self.kept.shared_state())
        self._prepared_for, self._prepared = self._present(), run.inside.trained.prepared

    @property
    def _is_prepared(self) -> bool:
        """Whether the run keeps this model, and no other one that was prepared since."""
        return self._prepared is self._run.inside.trained.prepared

    def _present(self) -> list[Any]:
        """The variables for which the run is prepared; others have to be prepared anew."""
        model = self._model
        return [
            model.optimizer,
            *model.trainable_variables,
            *(variable for variable, _ in shared_state(model).values()),
        ]

    def known(self, kind: str) -> Any:
        """What the coming call returns, if the run has it behind itself. ``kind`` is ``evaluated`` or ``stepped``."""
        calls: Calls = getattr(self, kind)
        return calls.known(self._fits.restored.get(kind, ""))

    def shared(self, act: Callable[[], Any]) -> Any:
        """What every worker makes of the same data, and has from the others if it joins behind that.

        Raises:
            DataError: workers have made different values of it.
        """
        value = None if self._run.inside.membership.joins else act()

        def compared(workers: Workers) -> Any:
            digests = workers.gather_json(_digest(value))
            if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
                raise DataError(refused("keras.other-results", rank=differing[0], cure=GeneratorBatches.cure))
            return workers.broadcast(value, 0)

        return self._run.together(compared)

    def predict(self, act: Callable[[int], Any], samples: KerasData) -> Any:
        """The outputs of a prediction on data: those of that time, if the run has it behind itself.

        ``act`` gets a number, so that each draws anew; predictions within one training have the same.
        """
        number = len(self.predicted)
        if self._run.inside.steps.under_way is not None:  # a run that resumes does not come here again
            return act(number)
        restored = self._fits.restored.get("predicted", [])
        known = restored[number] if number < len(restored) else None
        if known is None:
            outputs = act(number)
            known = {"outputs": outputs, "position": samples.position}
        samples.go_to(known["position"])
        self.predicted.append(known)
        return known["outputs"]

    def begin(self, fit: Fitting) -> None:
        """Begin the next training."""
        fit.begin()
        self._fits.add(fit)

    def end(self) -> Any:
        """End the newest training. Return its history, also if this worker has not taken part in it."""
        fit: Fitting = self._fits.begun[-1]
        if not fit.has_state:
            self._fits.recall()
        outline = self._run.together(lambda workers: workers.broadcast(fit.outline(), 0))
        if not fit.has_state:  # this worker joins, and the others have done it
            fit.load(outline)
        return fit.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        return {
            "weights": {} if self._is_prepared else self._weights.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "fits": self._fits.state(),
            "evaluated": self.evaluated.text,
            "stepped": self.stepped.text,
            "whole": self.is_whole,
            "predicted": list(self.predicted),
            "written": self._written,
            "kept": self.kept.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the whole state; the state of a training that this worker has yet to begin waits for that.

        Raises:
            CheckpointError: it is of another model or optimizer, of other callbacks, or of an earlier version.
        """
        if "whole" not in state:
            raise CheckpointError(refused("keras.earlier-version"))
        if state["weights"]:
            self._weights.load_state_dict(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.evaluated.load(state["evaluated"])
        self.stepped.load(state["stepped"])
        self.is_whole, self._written = state["whole"], state["written"]
        self.predicted = list(state["predicted"])
        self.kept.load(state.get("kept", {}))
        self._fits.load(state["fits"])

    def write(self, act: Callable[[], None]) -> None:
        """Have the main worker write a file, while the others wait. A run that resumes behind it leaves it alone."""
        if self._run.inside.ending.is_closed:  # each worker runs the last lines by itself
            if self._run.is_main:
                act()
            return
        is_written = self._written < self._fits.restored.get("written", 0)

        def together(workers: Workers) -> None:
            if workers.rank == 0 and not is_written:
                act()
            workers.barrier()

        self._run.together(together)
        self._written += 1
