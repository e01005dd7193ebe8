"""The factor that keeps gradients of float16 above 0: it halves when they overflow, and grows when they do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unisono.errors import Unreadable
from unisono.received import short, value_of

FIRST, GROWTH_STEPS = 2.0**16, 2000
"""As ``torch.amp.GradScaler`` has them."""

LEAST, MOST = 2.0**-20, 2.0**32
"""The least is below 1, since losses are multiplied by their shard's weight as well: by its number of tokens, say."""


class LossScale:
    """By what losses are multiplied before the backward pass, and sums of gradients divided.

    Each factor is a power of two, so both are exact. It changes by what all workers know: whether their gradient, added
    up, is finite. So it is the same on every number of workers. See Micikevicius and others, "Mixed Precision Training"
    (2018), and ``torch.amp.GradScaler``.

    Attributes:
        value: the factor.
        steps: the number of updates since it was changed last.
    """

    def __init__(self) -> None:
        self.value, self.steps = FIRST, 0

    def updated(self) -> None:
        """An update was made."""
        self.steps += 1
        if self.steps >= GROWTH_STEPS:
            self.value, self.steps = min(2 * self.value, MOST), 0

    def overflowed(self) -> None:
        """A gradient was not finite, and its step is skipped."""
        self.value, self.steps = max(self.value / 2, LEAST), 0

    def state_dict(self) -> dict[str, Any]:
        """Both numbers."""
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set both.

        Raises:
            Unreadable: they are no state of such a factor.
        """
        found = value_of({"value": float, "steps": int}, state, "loss scale")
        value, steps = found["value"], found["steps"]
        if not (LEAST <= value <= MOST and math.frexp(value)[0] == 0.5 and 0 <= steps < GROWTH_STEPS):
            raise Unreadable(f"{short(state)} is no loss scale")
        self.value, self.steps = value, steps
