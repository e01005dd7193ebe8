"""Keras 3 on torch: ``unisono.keras.Model`` trains a Keras model on any number of workers, to the same bits.

A script that imports this before anything that loads Keras gets an error that names what is missing.
"""

import os

from unisono.errors import JobError
from unisono.integrations.kit import require

require("keras", ["keras"])

_CURE = "set the environment variable KERAS_BACKEND=torch before Keras is imported"

try:
    import keras
except ImportError as error:
    chosen = os.environ.get("KERAS_BACKEND", "unset")
    raise JobError(
        f"unisono.keras needs Keras on torch, and Keras cannot be loaded with KERAS_BACKEND {chosen} ({error}): {_CURE}"
    ) from error

if keras.backend.backend() != "torch":
    raise JobError(f"unisono.keras needs Keras on torch, and here it is on {keras.backend.backend()}: {_CURE}")

from unisono.integrations.keras.fitting import LearningRateWarmup  # noqa: E402 (it loads what is asked for above)
from unisono.integrations.keras.model import Model  # noqa: E402 (likewise)

__all__ = ["LearningRateWarmup", "Model"]
