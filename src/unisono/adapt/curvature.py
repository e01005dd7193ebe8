"""Figures of the loss's curvature, from products with its Hessian and from losses along an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unisono.adapt.curvature_question import CONFIDENCE, FIGURES
from unisono.adapt.norms import GradientNorms

Vector = list[Tensor]
"""A tensor like each trained parameter."""

Product = Callable[[Vector], Vector]
"""The Hessian times a vector."""

TOLERANCE = 1e-3
"""Of the largest eigenvalue, relative: what another product still changes. Twice in a row, and it is found."""

MOST_PASSES = 20
FINEST = 1.1
"""The interval in which the critical step lies, as a ratio of its ends."""


@dataclass(frozen=True, slots=True)
class Curvature:
    """What was measured of the curvature of the mean loss over a global batch.

    What nobody has asked for is NaN.

    Attributes:
        loss: the mean loss where it was measured.
        largest: the largest eigenvalue λ of the Hessian, by Lanczos (C. Lanczos, 1950).
        residual: |H v - λ v| for the unit vector v that it was found with: an eigenvalue is no further from it.
        trace: the trace of the Hessian: the mean of z·Hz over vectors z of ±1 (M. F. Hutchinson, 1989).
        trace_error: the standard error of that mean, from the spread of the vectors.
        critical_step: the least multiple of the optimizers' next update with which the loss is larger than without it;
            infinity if no multiple up to a million is.
        critical_sharpness: 2 / (critical_step · learning rate), with that of the first group (D. S. Kalra et al., A
            Scalable Measure of Loss Landscape Curvature, arXiv 2601.16979).
        products: the number of products with the Hessian that it took; each costs about as much as two gradients.
        passes: the number of forward passes over the batch for the critical step.
        confidence: the share of the mean gradient's squared norm that is no noise, by layer (a module's name); see
            :func:`confidence_of`. A layer without a gradient is left out.
    """

    loss: float = math.nan
    largest: float = math.nan
    residual: float = math.nan
    trace: float = math.nan
    trace_error: float = math.nan
    critical_step: float = math.nan
    critical_sharpness: float = math.nan
    products: int = 0
    passes: int = 0
    confidence: Mapping[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """What was asked for and is finite, by the name that it has in the step's line of ``metrics.jsonl``."""
        values = self.critical_step, self.critical_sharpness, self.largest, self.trace
        found = {
            **dict(zip(FIGURES, values, strict=True)),
            **{f"{CONFIDENCE}{layer}": value for layer, value in self.confidence.items()},
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


def confidence_of(norms: GradientNorms) -> float:
    """How sure a gradient is: an estimate of |G|² / (|G|² + tr(Σ)/B), from 0 (noise alone) to 1 (no noise).

    With G the true gradient, Σ the covariance of one sample's and B the batch, E |ḡ|² = |G|² + tr(Σ)/B for the mean
    gradient ḡ; |G|² is estimated from the shards' gradients (McCandlish et al., arXiv 1812.06162, appendix A), and
    what is outside of 0 … 1 is cut off.
    """
    return min(1.0, max(0.0, norms.noise.signal / norms.mean))


def largest_eigenvalue(product: Product, start: Vector, most: int) -> tuple[float, float, int]:
    """The largest eigenvalue of a symmetric matrix, its residual, and how many products it took.

    Lanczos without reorthogonalisation: copies of eigenvalues that are found already do no harm to the largest.

    Args:
        product: the matrix times a vector.
        start: the first vector; not zero.
        most: the most products.
    """
    current, before = _scaled(start, 1 / _norm(start)), [torch.zeros_like(each) for each in start]
    diagonal, beside, found, settled = list[float](), list[float](), math.nan, 0
    residual = math.nan
    for number in range(1, most + 1):
        image = product(current)
        if number > 1:
            image = _added(image, before, -beside[-1])
        diagonal.append(dot(current, image))
        image = _added(image, current, -diagonal[-1])
        length, last = _norm(image), found
        found, share = _largest(diagonal, beside)
        residual = length * abs(share)
        settled = settled + 1 if abs(found - last) <= TOLERANCE * abs(found) else 0
        if settled == 2 or length <= 1e-12 * max(map(abs, diagonal)):
            return found, residual, number
        beside.append(length)
        before, current = current, _scaled(image, 1 / length)
    return found, residual, most


def trace_of(product: Product, draws: Sequence[Vector]) -> tuple[float, float]:
    """The trace of a symmetric matrix, and its standard error, by vectors of ±1; NaN for the error of a single one."""
    values = [dot(each, product(each)) for each in draws]
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else math.nan


def critical_step(loss_at: Callable[[float], float], loss: float, start: float = 1.0) -> tuple[float, int]:
    """The least multiple of an update that makes the loss larger, within a tenth, and how many losses it took.

    From a first guess by factors of two, and then by halves of what is left between two of them.

    Args:
        loss_at: the loss with so many times the update.
        loss: the loss without it.
        start: the first guess, such as the multiple that was found before.
    """
    low, high, passes = 0.0, math.inf, 0
    while (high == math.inf or low == 0.0 or high > FINEST * low) and passes < MOST_PASSES:
        tried = (
            start if not passes else 2 * low if high == math.inf else high / 2 if low == 0.0 else math.sqrt(low * high)
        )
        passes += 1
        if loss_at(tried) > loss:
            high = tried
        else:  # also where it is no number
            low = tried
    if high == math.inf:
        return high, passes
    return (math.sqrt(low * high) if low else high), passes


def dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The sum of the products of all elements, in 64 bits, tensor after tensor."""
    return math.fsum(float((one.double() * other.double()).sum()) for one, other in zip(left, right, strict=True))


def _norm(vector: Vector) -> float:
    return math.sqrt(dot(vector, vector))


def _scaled(vector: Vector, factor: float) -> Vector:
    return [each * factor for each in vector]


def _added(vector: Vector, other: Vector, factor: float) -> Vector:
    return [one + factor * two for one, two in zip(vector, other, strict=True)]


def _largest(diagonal: Sequence[float], beside: Sequence[float]) -> tuple[float, float]:
    """The largest eigenvalue of a tridiagonal matrix, and the last element of its unit vector."""
    edges = beside[: len(diagonal) - 1]
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(edges, 1) + np.diag(edges, -1))
    return float(values[-1]), float(vectors[-1, -1])
