"""Keras, on torch: whoever imports this before anything that loads Keras is told what is missing."""

import os
from importlib.util import find_spec

from unisono.errors import JobError

if find_spec("keras") is None:
    raise JobError(
        "unisono.keras needs Keras, which is not installed: pip install 'unisono[keras]', or in a clone of Unisono "
        "pip install '.[keras]'"
    )

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
