"""The Keras optimizer of a model, as the run sees it: an update on the mean gradient, and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.layout import form_of
from unisono.errors import CheckpointError
from unisono.integrations.attributes import put
from unisono.integrations.keras.kept import own_optimizer


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
                    f"{name} of the Keras {self._owner}'s state is not like its variable {variable.path}"
                )
        for variable, value in zip(variables, state.values(), strict=True):
            variable.assign(value)
