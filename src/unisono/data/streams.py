"""The random generators that a script may draw from, seeded and kept as one."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


@contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever is seeded or drawn inside leaves no trace outside."""
    before = Generators.capture()
    try:
        yield
    finally:
        before.restore()
