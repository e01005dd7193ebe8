"""Keras 3 on torch: ``unisono.keras.Model`` trains a Keras model on any number of workers, to the same bits."""

import unisono.integrations.keras.backend  # noqa: F401 (it refuses other backends, before what follows loads Keras)
from unisono.integrations.keras.callbacks import LearningRateWarmup
from unisono.integrations.keras.model import Model

__all__ = ["LearningRateWarmup", "Model"]
