"""What a loss function may return, and what is made of it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unisono.errors import LossError


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """A shard's mean loss, and the number of samples or tokens it is the mean of."""

    loss: Tensor
    weight: float

    @classmethod
    def of(cls, returned: Any, samples: int) -> "WeightedLoss":
        """Read ``loss`` or ``(loss, weight)``.

        Args:
            returned: by the loss function.
            samples: the weight unless one was returned.

        Raises:
            LossError: the loss is no scalar that depends on a parameter, or the weight is negative or not finite.
        """
        loss, weight = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, samples)
        if not isinstance(loss, Tensor):
            raise LossError(f"the loss function returned {_kind(loss)}: return a scalar tensor, or (loss, weight)")
        if loss.numel() != 1:
            raise LossError(
                f"the loss function returned a tensor of shape {list(loss.shape)}: return one number, the mean over "
                f"the shard's samples, for instance loss.mean()"
            )
        number = float(weight)
        if not loss.requires_grad and number != 0:
            raise LossError("the loss depends on no parameter: was it detached, or computed under no_grad?")
        if not 0 <= number < float("inf"):
            raise LossError(
                f"the loss function returned the weight {number}: it counts samples or tokens, so it is >= 0"
            )
        return cls(loss.reshape(()), number)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
