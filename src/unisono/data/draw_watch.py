"""Finds out whether samples draw from the global generators: those that do not need no seed of their own."""

from unisono.data.streams import Draws, SeededAgain


class DrawWatch:
    """Watches what is fetched in one process.

    Attributes:
        is_new: whether it has never ended.
        has_seen: whether anything was ever drawn.
    """

    def __init__(self) -> None:
        self.is_new, self.has_seen = True, False
        self._seed: int | None = None
        self._seeded: SeededAgain | None = None

    def begin(self, seed: int) -> None:
        """Seed all generators, and watch from here on."""
        if self._seeded is None or seed != self._seed:
            self._seed, self._seeded = seed, SeededAgain(seed)
        self._seeded.seed()

    def end(self) -> bool:
        """Whether anything was drawn since, or seeded. Leaves the generators in any state."""
        assert self._seeded is not None, "it has begun"
        drew = Draws.next() != self._seeded.untouched
        self.is_new, self.has_seen = False, self.has_seen or drew
        return drew
