"""What is kept of Keras' callbacks: in checkpoints, and for workers that join."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any
from warnings import warn

from keras.src.callbacks.monitor_callback import MonitorCallback

from unisono.checkpoint.codec import flatten
from unisono.errors import CheckpointError, UnisonoWarning

DERIVED = ("min_delta", "monitor_op")
"""Attributes that a callback which watches a metric sets anew from its settings."""

OF_KERAS = ("_model", "params", "model")
"""Attributes that Keras sets."""


class CallbackState:
    """The state of a callback that all workers call: its attributes that have changed since the training began.

    A callback with ``state_dict`` and ``load_state_dict`` says itself what that is.

    Args:
        callback: the callback, which has heard that the training begins.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self._base = {} if self._says_itself else deepcopy(self._plain())

    @property
    def _says_itself(self) -> bool:
        return hasattr(self.callback, "state_dict") and hasattr(self.callback, "load_state_dict")

    def state(self) -> dict[str, Any]:
        """What has changed."""
        if self._says_itself:
            return dict(self.callback.state_dict())
        plain = self._plain()
        changed = {name for name, value in plain.items() if name not in self._base or not same(value, self._base[name])}
        return {name: deepcopy(plain[name]) for name in sorted(changed)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Have that again; everything else is as the training began."""
        if self._says_itself:
            self.callback.load_state_dict(state)
            return
        for name, value in deepcopy({**self._base, **state}).items():
            setattr(self.callback, name, value)

    def warn(self) -> None:
        """Warn of attributes that cannot be kept."""
        kind = type(self.callback)
        if self._says_itself or kind.__module__.startswith("keras."):
            return
        plain = self._plain()
        lost = [
            name
            for name, value in vars(self.callback).items()
            if name not in plain and name not in OF_KERAS and name not in DERIVED and not callable(value)
        ]
        if lost:
            warn(
                f"the callback {kind.__name__} has {', '.join(sorted(lost))}, which checkpoints and workers that join "
                f"do not get: keep numbers, text, lists, dicts and arrays there, or give it state_dict and "
                f"load_state_dict",
                UnisonoWarning,
                stacklevel=2,
            )

    def _plain(self) -> dict[str, Any]:
        skipped = {*OF_KERAS, *(DERIVED if isinstance(self.callback, MonitorCallback) else ())}
        return {name: value for name, value in vars(self.callback).items() if name not in skipped and _is_kept(value)}


def same(one: Any, other: Any) -> bool:
    """Whether two plain values are the same, bit for bit."""
    (tree, tensors), (other_tree, other_tensors) = flatten(one), flatten(other)
    return (
        tree == other_tree
        and tensors.keys() == other_tensors.keys()
        and all(bool((tensors[name] == other_tensors[name]).all()) for name in tensors)
    )


def _is_kept(value: Any) -> bool:
    try:
        flatten(value)
    except CheckpointError:
        return False
    return True
