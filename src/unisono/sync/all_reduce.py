"""All workers add their gradients up, and make the same update."""

from dataclasses import dataclass
from typing import ClassVar

from unisono.sync.strategy import Strategy


@dataclass(frozen=True)
class AllReduce(Strategy):
    """The default, and exact: w ← update(w, Σ gᵢ / n), the sum along the job's summation tree.

    Every worker has the same weights after each step, and the final ones are those of the serial run, bit for bit.
    """

    name: ClassVar[str] = "all-reduce"
    is_exact: ClassVar[bool] = True
