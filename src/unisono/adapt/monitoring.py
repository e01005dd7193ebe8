"""Which steps are watched, and how closely."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from unisono.errors import JobError

ELEMENTS = 2**20
"""Of a gradient that are read at least, unless the user says otherwise: then watching costs next to nothing."""


@dataclass(frozen=True, slots=True)
class Monitoring:
    """What is measured in the steps themselves. It changes no bit of the weights.

    Attributes:
        every: steps from one that is watched to the next; 0 for none.
        one_in: how many blocks of a gradient one that is read stands for; 0 for as many as leave a million elements.
        links_every: steps from one after which latency and bandwidth between the workers are measured to the next; 0
            for none.

    Raises:
        JobError: a number is below 0.
    """

    every: int = 0
    one_in: int = 0
    links_every: int = 0

    def __post_init__(self) -> None:
        if self.every < 0:
            raise JobError(f"monitor={self.every!r}: use a number of steps, or 0 to watch none")
        if self.links_every < 0:
            raise JobError(f"Monitoring(links_every={self.links_every!r}): use a number of steps, or 0 for never")
        if self.one_in < 0:
            raise JobError(
                f"Monitoring(one_in={self.one_in!r}): use 1 to read all of a gradient, or 0 to leave it to us"
            )

    def watches(self, step: int, call: int) -> bool:
        """Whether a call of ``step.run`` is watched: the first of the step, if any."""
        return bool(self.every) and call == 0 and step % self.every == 0

    def measures_links(self, steps: int) -> bool:
        """Whether the connections between workers are measured after so many steps."""
        return bool(self.links_every) and steps % self.links_every == 0

    def blocks_of(self, tensors: Iterable[Tensor]) -> int:
        """How many blocks one stands for, in gradients of these tensors."""
        return self.one_in or max(1, sum(tensor.numel() for tensor in tensors) // ELEMENTS)
