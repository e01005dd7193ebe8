"""Transformers: ``unisono.transformers.TrainerMixin`` has a ``Trainer`` train on any number of workers."""

import unisono.integrations.transformers.package  # noqa: F401 (it says what is missing, before what follows loads it)
from unisono.integrations.transformers.mixin import TrainerMixin

__all__ = ["TrainerMixin"]
