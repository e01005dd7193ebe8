"""Transformers: ``unisono.transformers.TrainerMixin`` has a ``Trainer`` train on any number of workers."""

from unisono.integrations.kit import require

require("transformers", ["transformers", "accelerate"])

from unisono.integrations.transformers.mixin import TrainerMixin  # noqa: E402 (it loads what is asked for above)

__all__ = ["TrainerMixin"]
