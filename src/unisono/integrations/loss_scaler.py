"""Float16 in guests: the run scales losses, and the scaler that a guest has of its own changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.amp import GradScaler

from unisono.errors import JobError
from unisono.integrations.refused import refused
from unisono.received import value_of
from unisono.train.run import Run
from unisono.train.state.loss_scale import GROWTH_STEPS


class RunScaler(GradScaler):
    """A scaler that changes nothing, and knows the scale of the run: so a guest's own checkpoints hold it.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.device.type, enabled=False)
        self._trained = run.inside.trained

    def get_scale(self) -> float:
        """The factor of losses."""
        return self._trained.loss_scale.value

    def state_dict(self) -> dict[str, Any]:
        """The scale, as torch's own scaler has it in files."""
        scale = self._trained.loss_scale
        factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": GROWTH_STEPS}
        return {"scale": scale.value, **factors, "_growth_tracker": scale.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        """Have the run go on with a scale. A run that resumes has a newer one, and keeps it.

        Raises:
            Unreadable: it is none that a run can have: a power of two, from 2**-20 to 2**32.
        """
        if state_dict and self._trained.restored is None:
            plain = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
            state = value_of(dict[str, Any], plain, "state of a GradScaler")
            known = {"value": state.get("scale"), "steps": state.get("_growth_tracker")}
            self._trained.loss_scale.load_state_dict(known)


def scale_of(run: Run) -> float:
    """The factor of losses that go backward in a loss function; 1 where the run scales none."""
    return run.inside.trained.loss_scale.value if run.job.precision == "fp16" else 1.0


def require_scaling(run: Run, setting: str) -> None:
    """Refuse a guest that computes in float16 on a run that scales no losses.

    Args:
        run: the run.
        setting: what the guest was told, for messages.

    Raises:
        JobError: it scales none.
    """
    if run.job.precision != "fp16":
        raise JobError(refused("run.no-scaling", setting=setting, precision=run.job.precision))


def take_scaling(accelerator: Any, run: Run, setting: str) -> None:
    """Have one of accelerate's accelerators leave losses to the run, if it computes in float16.

    Args:
        accelerator: the accelerator, which has prepared nothing yet.
        run: the run.
        setting: what it was told, for messages.

    Raises:
        JobError: the run scales no losses.
    """
    if accelerator.mixed_precision == "fp16":
        require_scaling(run, setting)
        accelerator.scaler = RunScaler(run)
        accelerator.native_amp = True  # accelerate leaves float32 as it is, without a word, on CPUs
