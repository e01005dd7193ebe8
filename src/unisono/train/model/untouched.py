"""Weights that only the run may change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.errors import ModelError


class Untouched:
    """Notices when the script changes weights of which the run has copies elsewhere.

    Args:
        weights: the parameters.
        why: they must not be changed, as a sentence.
    """

    def __init__(self, weights: Sequence[Tensor], why: str) -> None:
        self._weights, self._why = weights, why
        self.accept()

    def accept(self) -> None:
        """They are as they should be."""
        self._versions = [weight._version for weight in self._weights]

    def require(self) -> None:
        """Refuse weights that were changed since they were accepted.

        Raises:
            ModelError: says why, and what to do.
        """
        if self._versions != [weight._version for weight in self._weights]:
            about = "the script has changed weights between two steps"
            raise ModelError(f"{about}. {self._why}: do it before run.prepare, or go without")
