"""The masks of Lightning's ``ModelPruning``: a run knows all buffers of a model before it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.utils import prune

from unisono.integrations.lightning.framework import pl


class Pruning:
    """The prunings of a trainer.

    Args:
        change: a function that is called when the model has other parameters and buffers than before.
    """

    def __init__(self, trainer: Any, change: Callable[[], None]) -> None:
        self._module, self._change = trainer.lightning_module, change
        self._prunings = prunings = [
            callback for callback in trainer.callbacks if isinstance(callback, pl.callbacks.ModelPruning)
        ]
        for callback in prunings:
            for module, name in callback._parameters_to_prune:
                if not hasattr(module, f"{name}_mask"):
                    prune.identity(module, name)  # all ones
        self._permanent = [callback for callback in prunings if callback._make_pruning_permanent]
        for callback in self._permanent:
            vars(callback)["make_pruning_permanent"] = partial(self._make_permanent, callback)

    @property
    def is_permanent(self) -> bool:
        """Whether masks go with the end of the fit."""
        return bool(self._permanent)

    def refresh(self) -> None:
        """Have pruned weights as a forward pass has them: callbacks go by those, and a worker may have no samples."""
        for callback in self._prunings:
            for module, _ in callback._parameters_to_prune:
                for hook in module._forward_pre_hooks.values():
                    if isinstance(hook, prune.BasePruningMethod):
                        hook(module, None)

    def state(self) -> list[Tensor | None]:
        """The first weights; None for those that were reset: in Lightning, both are one tensor from then on."""
        return [
            None if first.data_ptr() == held.data_ptr() else first.detach().clone() for first, held in self._tickets()
        ]

    def load(self, state: Sequence[Tensor | None]) -> None:
        """Set the first weights."""
        for (first, held), kept in zip(self._tickets(), state, strict=False):
            first.data = held.data if kept is None else kept.to(first.device, copy=True)

    def _tickets(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The first weights, for the hypothesis of lottery tickets, each with the weights that are trained."""
        for callback in self._prunings:
            for layer in (callback._original_layers or {}).values():
                for number, name in layer["names"]:
                    module, _ = callback._parameters_to_prune[number]
                    yield getattr(layer["data"], name), getattr(module, f"{name}_orig", getattr(module, name))

    def end(self) -> None:
        """Take the masks away. The callback has done so by itself, but for a fit that is left out on this worker."""
        for callback in self._permanent:
            callback.make_pruning_permanent(self._module)

    def close(self) -> None:
        """Give the callbacks back as they were."""
        for callback in self._permanent:
            vars(callback).pop("make_pruning_permanent", None)

    def _make_permanent(self, callback: Any, module: Any) -> None:
        type(callback).make_pruning_permanent(callback, module)
        self._change()
