"""The gradient noise scale over many steps."""

from dataclasses import dataclass

from unisono.adapt.average import Average
from unisono.adapt.norms import GradientNorms, Noise

DECAY = 0.99
_NOTHING = Average(DECAY)


@dataclass(frozen=True, slots=True)
class NoiseAverage:
    """Averages of variance and signal, each on its own: only their quotient is biased, and only once.

    Attributes:
        variance: of the steps so far.
        signal: of the steps so far.
    """

    variance: Average = _NOTHING
    signal: Average = _NOTHING

    @classmethod
    def of(cls, decay: float) -> "NoiseAverage":
        """Nothing seen yet, with a decay per step."""
        return cls(Average(decay), Average(decay))

    def after(self, norms: GradientNorms) -> "NoiseAverage":
        """With one more step; a step that says nothing changes nothing."""
        if not norms.are_enough:
            return self
        noise = norms.noise
        return NoiseAverage(self.variance.after(noise.variance), self.signal.after(noise.signal))

    @property
    def noise(self) -> Noise | None:
        """The averages; None before the first step."""
        variance, signal = self.variance.value, self.signal.value
        return None if variance is None or signal is None else Noise(variance, signal)
