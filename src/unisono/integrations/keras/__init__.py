"""Keras 3 on torch: ``unisono.keras.Model`` trains a Keras model on any number of workers, to the same bits."""

from importlib.util import find_spec

from unisono.errors import JobError

if find_spec("keras") is None:
    raise JobError(
        "unisono.keras needs Keras, which is not installed: pip install 'unisono[keras]', or in a clone of Unisono "
        "pip install '.[keras]'"
    )

import keras

if keras.backend.backend() != "torch":
    raise JobError(
        f"unisono.keras needs Keras on torch, and here it is on {keras.backend.backend()}: set the environment "
        f"variable KERAS_BACKEND=torch before Keras is imported, and see that the 'unisono[keras]' extra is installed"
    )

from unisono.integrations.keras.model import Model

__all__ = ["Model"]
