"""What the squared norms of a step's gradients say about their noise."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Squared norms of the gradients of one step. The groups are the shards, so that no figure depends on the workers.

    Attributes:
        groups: of each shard's mean gradient, without empty shards.
        sizes: the shards' numbers of samples, in the same order.
        mean: of the mean gradient over the global batch.
    """

    groups: Sequence[float]
    sizes: Sequence[float]
    mean: float

    def __post_init__(self) -> None:
        if len(self.groups) != len(self.sizes) or not all(size > 0 for size in self.sizes):
            raise ValueError(f"{len(self.groups)} norms need as many sizes above 0, not {list(self.sizes)}")

    @property
    def are_enough(self) -> bool:
        """Whether anything can be said of the noise: it takes two groups at least."""
        return len(self.groups) > 1

    @property
    def noise(self) -> "Noise":
        """Unbiased estimates from this step alone (McCandlish et al., arXiv 1812.06162, appendix A).

        With B the batch, b the harmonic mean of the shards' sizes (their size, if they are equal), ḡ the mean gradient
        and g those of the shards::

            variance = (mean |g|² - |ḡ|²) / (1/b - 1/B)
            signal   = (B |ḡ|² - b mean |g|²) / (B - b)

        Raises:
            ValueError: there are fewer than two shards with samples.
        """
        if not self.are_enough:
            raise ValueError("the noise of a gradient needs at least 2 shards with samples")
        big = sum(self.sizes)
        small = len(self.sizes) / sum(1 / size for size in self.sizes)
        groups = sum(self.groups) / len(self.groups)
        return Noise(
            variance=(groups - self.mean) / (1 / small - 1 / big),
            signal=(big * self.mean - small * groups) / (big - small),
        )


@dataclass(frozen=True, slots=True)
class Noise:
    """How much the gradient of a sample varies, and how large the true gradient is.

    Attributes:
        variance: tr(Σ), the trace of the covariance of one sample's gradient.
        signal: |G|², the squared norm of the true gradient. An estimate of it can be negative.
    """

    variance: float
    signal: float

    @property
    def scale(self) -> float | None:
        """The gradient noise scale tr(Σ) / |G|², in samples; None as long as the signal is not yet known."""
        return self.variance / self.signal if self.signal > 0 else None

    def gain(self, base: float, batch: float) -> float:
        """How many steps with a batch of ``base`` samples one with ``batch`` is worth: AdaScale's gain, 1 … batch/base.

        Johnson et al., ICML 2020: r = (σ² + μ²) / (σ²/S + μ²), where σ² = tr(Σ) / base, μ² = |G|² and S = batch / base.

        Args:
            base: samples of the batch for which the learning rates were made.
            batch: samples of the batch.
        """
        if self.variance <= 0:
            return 1.0
        signal = max(0.0, self.signal)
        gain = batch / base * (self.variance + base * signal) / (self.variance + batch * signal)
        return min(max(gain, 1.0), max(batch / base, 1.0))

    def efficiency(self, base: float, batch: float) -> float:
        """The progress per sample of a batch, as a share of that of a batch of ``base`` samples.

        Qiao et al. (Pollux), OSDI 2021: (φ + base) / (φ + batch) with the noise scale φ.
        """
        scale = self.scale
        return 1.0 if scale is None else (scale + base) / (scale + batch)
