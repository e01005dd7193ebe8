"""A learning rate that grows to what a large batch allows."""

from unisono.adapt.policy import Policy
from unisono.adapt.view import View
from unisono.errors import JobError


class LinearScaling(Policy):
    """Brings the learning rate from the script's to ``factor`` times that, evenly over the first epochs.

    For a batch that is ``factor`` times the one for which the rate was made: Goyal et al., arXiv 1706.02677.

    Args:
        factor: how many times as large the batch is.
        samples: over which the rate grows: 5 epochs of the data set, say.

    Raises:
        JobError: a number is not above 0.
    """

    def __init__(self, factor: float, samples: int) -> None:
        if not factor > 0 or samples < 1:
            raise JobError(f"LinearScaling(factor={factor}, samples={samples}): both need to be above 0")
        self._factor, self._samples = factor, samples
        self.reached = 1.0

    def after_step(self, view: View) -> None:
        """A little more."""
        wanted = 1 + (self._factor - 1) * min(1.0, view.samples / self._samples)
        if wanted != self.reached and view.learning_rate != 0:  # of 0, as at a schedule's end, there are no multiples
            self.set_learning_rate(view.learning_rate * wanted / self.reached, samples=view.samples)
            self.reached = wanted
