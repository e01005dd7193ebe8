"""accelerate: ``unisono.accelerate.Accelerator`` has a script's own loop train on any number of workers."""

from unisono.integrations.kit import require

require("accelerate", ["accelerate"])

from unisono.integrations.accelerate.accelerator import Accelerator  # noqa: E402 (it loads what is asked for above)

__all__ = ["Accelerator"]
