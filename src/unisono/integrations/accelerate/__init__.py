"""accelerate: ``unisono.accelerate.Accelerator`` has a script's own loop train on any number of workers."""

import unisono.integrations.accelerate.package  # noqa: F401 (it says what is missing, before what follows loads it)
from unisono.integrations.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
