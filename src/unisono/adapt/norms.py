"""The noise of gradients, from the squared norms of a step; and the settings of measurements in the steps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from unisono.arguments import require_parameters, require_types
from unisono.errors import JobError
from unisono.received import short

if TYPE_CHECKING:
    from torch import Tensor  # not at run time, since commands that show decisions of policies do not load torch

# Moving averages that know the weight of their values.


@dataclass(frozen=True, slots=True)
class Average:
    """An exponential moving average, corrected for its start at nothing.

    Attributes:
        decay: the weight of the past, per value: 0 keeps the newest value alone.
        total: the sum of the values, each times ``decay`` to the power of its age, times ``1 - decay``.
        weight: the weight of all values together: 0 before the first, towards 1.
    """

    decay: float
    total: float = 0.0
    weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r}: needs to be at least 0 and below 1")

    def after(self, value: float) -> "Average":
        """The average with one more value."""
        share = 1 - self.decay
        return replace(self, total=self.decay * self.total + share * value, weight=self.decay * self.weight + share)

    @property
    def value(self) -> float | None:
        """The average; None before the first value."""
        return self.total / self.weight if self.weight else None


# The noise of a step's gradients, by their squared norms.


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Squared norms of the gradients of one step. The groups are the shards, so that no figure depends on the workers.

    Attributes:
        groups: the squared norm of each shard's mean gradient, without empty shards.
        sizes: the shards' numbers of samples, in the same order.
        mean: the squared norm of the mean gradient over the global batch.
    """

    groups: Sequence[float]
    sizes: Sequence[float]
    mean: float

    def __post_init__(self) -> None:
        if len(self.groups) != len(self.sizes) or not all(size > 0 for size in self.sizes):
            raise ValueError(f"{len(self.groups)} norms need as many sizes above 0, not {list(self.sizes)}")

    @property
    def are_enough(self) -> bool:
        """Whether the noise can be estimated: that takes two groups at least."""
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
    """The variance of one sample's gradient, and the squared norm of the true gradient.

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
        """Return AdaScale's gain, 1 … batch/base: how many steps of ``base`` samples one of ``batch`` is worth.

        Johnson et al., ICML 2020: r = (σ² + μ²) / (σ²/S + μ²), where σ² = tr(Σ) / base, μ² = |G|² and S = batch / base.

        Args:
            base: the number of samples of the batch for which the learning rates were made.
            batch: the number of samples of the batch.
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


# The variance of samples' losses, from the losses of shards.


def loss_variance(losses: Sequence[float], sizes: Sequence[float]) -> float | None:
    """An unbiased estimate of the variance of one sample's loss, from the means over shards.

    With means l over b samples each, and l̄ over all of them: Σ b (l - l̄)² / (S - 1), where S is the number of shards.

    Args:
        losses: the mean of each shard, without empty ones.
        sizes: the shards' numbers of samples.

    Returns:
        None if there are fewer than two shards.
    """
    if len(losses) < 2:
        return None
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    return sum(size * (loss - mean) ** 2 for loss, size in zip(losses, sizes, strict=True)) / (len(losses) - 1)


# The steps that are watched, and the part of a gradient that is read.

ELEMENTS = 2**20
"""The elements of a gradient that are read by default, if it has more: watching costs next to nothing then."""


@dataclass(frozen=True, slots=True)
class Monitoring:
    """The settings of measurements in the steps themselves. They change no bit of the weights.

    Attributes:
        every: steps from one that is watched to the next; 0 for none.
        one_in: one block in so many of a gradient is read; 0 chooses so that a million elements are read.
        links_every: steps from one after which latency and bandwidth between the workers are measured to the next; 0
            for none.
        curvature_every: steps from one before whose update curvature is measured to the next; 0 for none.
        curvature: what is measured then, by the names of
            :class:`~unisono.adapt.norms.CurvatureQuestion`; the critical sharpness alone, if nothing is said.

    Raises:
        JobError: a setting is of another type, or below 0.
    """

    every: int = 0
    one_in: int = 0
    links_every: int = 0
    curvature_every: int = 0
    curvature: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_types(Monitoring, {name: getattr(self, name) for name in Monitoring.__slots__})
        if self.curvature_every < 0:
            raise JobError(
                f"Monitoring(curvature_every={short(self.curvature_every)}): use a number of steps, or 0 for never"
            )
        if self.every < 0:
            raise JobError(f"monitor={short(self.every)}: use a number of steps, or 0 to watch none")
        if self.links_every < 0:
            raise JobError(f"Monitoring(links_every={short(self.links_every)}): use a number of steps, or 0 for never")
        if self.one_in < 0:
            raise JobError(
                f"Monitoring(one_in={short(self.one_in)}): use 1 to read all of a gradient, or 0 to leave it to us"
            )

    def watches(self, step: int, call: int) -> bool:
        """Whether a call of ``step.run`` is watched: the first of the step, if any."""
        return bool(self.every) and call == 0 and step % self.every == 0

    def measures_links(self, steps: int) -> bool:
        """Whether the connections between workers are measured after so many steps."""
        return bool(self.links_every) and steps % self.links_every == 0

    def measures_curvature(self, step: int, call: int) -> bool:
        """Whether curvature is measured before the update of a call of ``step.run``."""
        return bool(self.curvature_every) and call == 0 and step % self.curvature_every == 0

    def blocks_of(self, tensors: Iterable["Tensor"]) -> int:
        """The number of blocks that a read block stands for, in gradients of these tensors."""
        return self.one_in or max(1, sum(tensor.numel() for tensor in tensors) // ELEMENTS)


# The gradient noise scale over many steps.

DECAY = 0.99
_NOTHING = Average(DECAY)


@dataclass(frozen=True, slots=True)
class NoiseAverage:
    """Averages of variance and signal, each on its own: only their quotient is biased, and only once."""

    variance: Average = _NOTHING
    signal: Average = _NOTHING

    @classmethod
    def of(cls, decay: float) -> "NoiseAverage":
        """Return an average without values, with a decay per step."""
        return cls(Average(decay), Average(decay))

    def after(self, norms: GradientNorms) -> "NoiseAverage":
        """The averages with one more step; a step with fewer than two groups changes nothing."""
        if not norms.are_enough:
            return self
        noise = norms.noise
        return NoiseAverage(self.variance.after(noise.variance), self.signal.after(noise.signal))

    @property
    def noise(self) -> Noise | None:
        """The averages; None before the first step."""
        variance, signal = self.variance.value, self.signal.value
        return None if variance is None or signal is None else Noise(variance, signal)


# The curvature to measure, and the names of the results.

FIGURES = ("critical_step", "critical_sharpness", "largest_eigenvalue", "hessian_trace")
"""The names in lines of ``metrics.jsonl``."""

CONFIDENCE = "confidence/"
"""The prefix of the name of a layer."""


@dataclass(frozen=True, slots=True)
class CurvatureQuestion:
    """The curvature to measure.

    Attributes:
        iterations: the most products with the Hessian for its largest eigenvalue; 0 leaves it out. 50 are plenty.
        vectors: the number of drawn vectors for its trace; 0 leaves it out.
        critical: whether to measure the critical step and sharpness, by one gradient and about 6 forward passes.
        start: the first guess of the critical step, such as the one that was found before, which saves passes.
        confidence: whether to measure how sure each layer's gradient is, by two gradients.

    Raises:
        JobError: a setting is of another type, or out of range.
    """

    iterations: int = 0
    vectors: int = 0
    critical: bool = True
    start: float = 1.0
    confidence: bool = False

    def __post_init__(self) -> None:
        require_types(CurvatureQuestion, asdict(self))
        if self.iterations < 0 or self.vectors < 0 or not 0 < self.start < math.inf:
            raise JobError(f"run.curvature: {self} needs numbers from 0 on, and above 0 for start")


def question_of(settings: Mapping[str, Any]) -> CurvatureQuestion:
    """Read from a script's settings which curvature to measure.

    Raises:
        JobError: there is no such setting, or it is of another type or out of range.
    """
    require_parameters(CurvatureQuestion, settings)
    return CurvatureQuestion(**settings)
