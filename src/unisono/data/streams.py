"""The random generators that a script may draw from, seeded and kept as one."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

_ONE_AT_A_TIME = threading.Lock()
"""torch waits for its generator without letting other threads go on, and the one that has it may need to go on."""


@dataclass(frozen=True, slots=True)
class Generators:
    """The state of torch's generators (CPU, and CUDA where it is in use), NumPy's and Python's."""

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> "Generators":
        """The generators' state now."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        # Not the bit generator's state alone: NumPy keeps every second normal number for the next call.
        with _ONE_AT_A_TIME:
            cpu = torch.get_rng_state()
        return cls(cpu, cuda, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Set the generators back to this state."""
        with _ONE_AT_A_TIME:
            torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def seed_generators(seed: int) -> None:
    """Seed all generators from one 64-bit seed."""
    # torch.manual_seed would do, but reaches for every accelerator's lazy initialisation: 80 times slower.
    with _ONE_AT_A_TIME:
        torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


_DRAWN = torch.empty((), dtype=torch.int64)


class Draws(NamedTuple):
    """One number of each generator. CUDA's tells how many it has given."""

    torch_cpu: int
    torch_cuda: int
    numpy: float
    python: float

    @classmethod
    def next(cls) -> "Draws":
        """The generators' next numbers, which are drawn."""
        cuda = 0
        if torch.cuda.is_initialized():
            cuda = torch.cuda.default_generators[torch.cuda.current_device()].get_offset()
        with _ONE_AT_A_TIME:
            cpu = int(_DRAWN.random_())
        return cls(cpu, cuda, np.random.random(), random.random())  # noqa: S311 (nothing is kept secret by it)


class SeededAgain:
    """Generators that are seeded with one seed again and again, in half the time."""

    def __init__(self, seed: int) -> None:
        seed_generators(seed)
        self._seed, self._torch, self._python = seed, torch.default_generator.get_state(), random.getstate()
        self.untouched = Draws.next()

    def seed(self) -> None:
        """Seed all generators."""
        with _ONE_AT_A_TIME:
            torch.default_generator.set_state(self._torch)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(self._seed)
        np.random.seed(self._seed & 0xFFFFFFFF)
        random.setstate(self._python)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever is seeded or drawn inside leaves no trace outside."""
    before = Generators.capture()
    try:
        yield
    finally:
        before.restore()


class DrawWatch:
    """Finds out whether samples that one process fetches draw: those that do not need no seed of their own.

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
