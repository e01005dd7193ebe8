"""What of a Keras model cannot be kept exact, and is refused with the cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from unisono.errors import JobError, ModelError
from unisono.integrations.refused import refused


def require_kept(model: Any) -> None:
    """Refuse a model, or what it was compiled with, that cannot be trained on several workers as it is on one.

    Args:
        model: the Keras model.

    Raises:
        JobError: there is an active ``keras.distribution``.
        ModelError: it is no Keras model, or was compiled with what cannot be kept; says what to do.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"unisono.keras.Model needs a Keras model, got {type(model).__name__}")
    if keras.distribution.distribution() is not None:
        raise JobError(refused("keras.distribution"))
    if stateful := [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]:
        raise ModelError(refused("keras.stateful", layer=stateful[0]))
    if not model.compiled:
        return
    if model.jit_compile:
        raise ModelError("compile(jit_compile=True): compiled steps have other bits; leave it out, or say False")
    if model.steps_per_execution != 1:
        raise ModelError(f"compile(steps_per_execution={model.steps_per_execution}): each step is one update; use 1")
    if wholly := [one.path for one in model.trainable_variables if one.dtype == "float16"]:
        raise ModelError(refused("keras.float16", variable=wholly[0]))


def scales_loss(model: Any) -> bool:
    """Whether Keras would scale the loss of a model, or will when it is compiled."""
    if model.compiled:
        return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return is_half(model)


def is_half(model: Any) -> bool:
    """Whether layers compute in float16, by Keras' own policy."""
    return bool(model.dtype_policy.name == "mixed_float16")


def own_optimizer(model: Any) -> Any:
    """The optimizer that updates, without one around it that scales the loss."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def require_number(model: Any) -> None:
    """Refuse losses that are no number, unless the model makes one of them by itself.

    Args:
        model: the compiled model.

    Raises:
        ModelError: there is one; names its reduction.
    """
    own = type(model)
    if own.train_step is not keras.Model.train_step or own.compute_loss is not keras.Model.compute_loss:
        return
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", "mean") in (None, "none"):
            raise ModelError(refused("keras.loss-no-number", loss=loss.name, reduction=loss.reduction))


def optimizers_of(model: Any) -> Iterator[Any]:
    """The optimizers that a model's own code can reach as its attributes, each once."""
    seen: set[int] = set()
    for value in [model.optimizer, *vars(model).values()]:
        several = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        for one in several:
            if isinstance(one, keras.optimizers.Optimizer) and id(one) not in seen:
                seen.add(id(one))
                yield one
