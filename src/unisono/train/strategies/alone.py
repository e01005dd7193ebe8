"""A worker that computes something by itself."""

from unisono.membership.generation import Generation
from unisono.plan.split import Split
from unisono.reduce.transport import Solo
from unisono.train.group.workers import Workers


class Alone(Workers):
    """One of several workers, which does without the others for a while.

    Whoever watches those several sees that it gets on.

    Args:
        among: the several.
        shards: of what it computes.
    """

    def __init__(self, among: Workers, shards: int) -> None:
        super().__init__(Generation(among.generation.number, 0, Split.even(shards, 1)), Solo(shards))
        self._among = among

    def tick(self) -> None:
        """So does the worker that it is among the others."""
        super().tick()
        self._among.tick()
