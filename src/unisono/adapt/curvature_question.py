"""What is to be measured of curvature, and the names of what is found. Without torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unisono.arguments import require_kinds, require_known
from unisono.errors import JobError

FIGURES = ("critical_step", "critical_sharpness", "largest_eigenvalue", "hessian_trace")
"""The names in lines of ``metrics.jsonl``."""

CONFIDENCE = "confidence/"
"""What comes before the name of a layer."""


@dataclass(frozen=True, slots=True)
class CurvatureQuestion:
    """What is to be measured.

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
        require_kinds(CurvatureQuestion, asdict(self))
        if self.iterations < 0 or self.vectors < 0 or not 0 < self.start < math.inf:
            raise JobError(f"run.curvature: {self} needs numbers from 0 on, and above 0 for start")


def question_of(said: Mapping[str, Any]) -> CurvatureQuestion:
    """What is to be measured of curvature, in a script's words.

    Raises:
        JobError: there is no such setting, or it is of another type or out of range.
    """
    require_known(CurvatureQuestion, said)
    return CurvatureQuestion(**said)
