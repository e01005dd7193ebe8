"""The random generators that a script may draw from, seeded and kept as one."""

from __future__ import annotations

import ctypes
import random
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.device import generator_checksum, in_use
from unisono.errors import Unreadable

_ONE_AT_A_TIME = threading.Lock()
"""torch waits for its generator without letting other threads go on, and the one that has it may need to go on."""


# NumPy copies the state of its generator number by number, which takes longer than all else here. Most often nobody has
# drawn from it since it was seeded, and to know that it is enough to look at its memory.

_NUMPY_NUMBERS = 624
_NUMPY_BYTES = 4 * _NUMPY_NUMBERS + 4  # and how many of them were drawn


class _NumpySeed(NamedTuple):
    """The newest seed of NumPy's generator, and the state that it led to."""

    seed: int
    memory: bytes


_numpy_seeds: list[_NumpySeed] = []
"""The newest; none where the memory cannot be read."""


def _numpy_memory() -> bytes:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's types leave it out
    return _memory_at(generator.ctypes.state_address).raw


@lru_cache(maxsize=4)
def _memory_at(address: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * _NUMPY_BYTES).from_address(address)


@cache
def _is_numpy_readable() -> bool:
    """Whether the state lies in memory as it did in all versions of NumPy so far."""
    _, numbers, drawn, *_ = np.random.get_state()
    return _numpy_memory() == np.asarray(numbers, np.uint32).tobytes() + np.int32(drawn).tobytes()


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed)
    _numpy_seeds[:] = [_NumpySeed(seed, _numpy_memory())] if _is_numpy_readable() else []


def _numpy_state() -> Any:
    """The state, or the seed if nobody has drawn since."""
    newest = _numpy_seeds[0] if _numpy_seeds else None
    return newest.seed if newest is not None and newest.memory == _numpy_memory() else np.random.get_state()


# All of them as one.

_NO_BYTES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Generators:
    """The state of torch's generators (the CPU's, and the device's where one is in use), NumPy's and Python's.

    NumPy's may be the seed that it was made from.
    """

    torch_cpu: torch.Tensor
    torch_device: torch.Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> Generators:
        """The generators' state now."""
        device = None if (module := in_use()) is None else module.get_rng_state()
        # Not the bit generator's state alone: NumPy keeps every second normal number for the next call.
        with _ONE_AT_A_TIME:
            cpu = torch.get_rng_state()
        return cls(cpu, device, _numpy_state(), random.getstate())

    def restore(self) -> None:
        """Set the generators back to this state."""
        with _ONE_AT_A_TIME:
            torch.set_rng_state(self.torch_cpu)
        if self.torch_device is not None:
            in_use().set_rng_state(self.torch_device)
        if isinstance(self.numpy, int):
            _seed_numpy(self.numpy)
        else:
            np.random.set_state(self.numpy)
        random.setstate(self.python)

    def as_tensors(self) -> list[torch.Tensor]:
        """The state as bytes: four tensors, 1-D, uint8, on the CPU. Empty for what is as the newest seed left it."""
        numpy = b""
        if not isinstance(self.numpy, int):
            _, numbers, place, has_gauss, gauss = self.numpy
            numpy = np.asarray(numbers, np.uint32).tobytes() + struct.pack("<qqd", place, has_gauss, gauss)
        _, words, gauss = self.python
        python = np.array(words, np.uint32).tobytes() + struct.pack("<?d", gauss is not None, gauss or 0.0)
        device = _NO_BYTES if self.torch_device is None else self.torch_device.cpu()
        return [
            self.torch_cpu,
            device,
            *(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NO_BYTES for data in (numpy, python)),
        ]

    @staticmethod
    def set_tensors(tensors: Sequence[torch.Tensor]) -> None:
        """Set the generators as :meth:`as_tensors` has them; what is empty there has the same newest seed here.

        Raises:
            Unreadable: they are no such state.
        """
        try:
            cpu, device, numpy, python = tensors
            with _ONE_AT_A_TIME:
                torch.set_rng_state(cpu.clone())
            if device.numel() and (module := in_use()) is not None:
                module.set_rng_state(device.clone())
            if numpy.numel():
                read = numpy.numpy().tobytes()
                words = np.frombuffer(read[: 4 * _NUMPY_NUMBERS], np.uint32)
                np.random.set_state(("MT19937", words, *struct.unpack("<qqd", read[4 * _NUMPY_NUMBERS :])))
            read = python.numpy().tobytes()
            has_gauss, gauss = struct.unpack("<?d", read[-9:])
            words = np.frombuffer(read[:-9], np.uint32)
            random.setstate((3, tuple(words.tolist()), gauss if has_gauss else None))
        except (ValueError, RuntimeError, TypeError, struct.error) as error:
            raise Unreadable(f"the received data are no state of random generators: {error}") from error


def seed_generators(seed: int) -> None:
    """Seed all generators from one 64-bit seed."""
    # torch.manual_seed would do, but reaches for every accelerator's lazy initialisation: 80 times slower.
    with _ONE_AT_A_TIME:
        torch.default_generator.manual_seed(seed)
    if (module := in_use()) is not None:
        module.manual_seed(seed)
    _seed_numpy(seed & 0xFFFFFFFF)
    random.seed(seed)
    _newest_seed[:] = [seed]


_newest_seed: list[int] = []


def newest_seed() -> int:
    """The seed of the newest call of :func:`seed_generators`, which has to be one of this thread's."""
    return _newest_seed[0]


_DRAWN = torch.empty((), dtype=torch.int64)


class Draws(NamedTuple):
    """A number from each generator. The number of the device's generator counts its draws."""

    torch_cpu: int
    torch_device: int
    numpy: float
    python: float

    @classmethod
    def next(cls) -> Draws:
        """The generators' next numbers, which are drawn."""
        with _ONE_AT_A_TIME:
            cpu = int(_DRAWN.random_())
        return cls(cpu, generator_checksum(), np.random.random(), random.random())  # noqa: S311 (nothing is kept secret by it)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Within the context, seeding and drawing leave no trace outside."""
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

    def begin(self, seed: int) -> None:
        """Seed all generators, and watch from here on. The same seed again and again takes half the time."""
        if seed != self._seed:
            seed_generators(seed)
            self._seed, self._torch, self._python = seed, torch.default_generator.get_state(), random.getstate()
            self._untouched = Draws.next()
        with _ONE_AT_A_TIME:
            torch.default_generator.set_state(self._torch)
        if (module := in_use()) is not None:
            module.manual_seed(seed)
        _seed_numpy(seed & 0xFFFFFFFF)
        random.setstate(self._python)

    def end(self) -> bool:
        """Whether anything was drawn since, or seeded. Leaves the generators in any state."""
        drew = Draws.next() != self._untouched
        self.is_new, self.has_seen = False, self.has_seen or drew
        return drew


OWN = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
"""Kinds of generators that a data set may keep."""

PLAIN = (int, float, str, bytes)
"""Kinds that hold nothing."""

MOST = 1000
"""The most objects that are looked at."""

MOST_ELEMENTS = 64
"""Elements of a list or a mapping that are looked at."""


def generators_in(thing: Any) -> list[Any]:
    """The generators that an object holds, or that objects in its attributes do."""
    waiting, known, result = deque([thing]), {id(thing)}, list[Any]()
    for _ in range(MOST):
        if not waiting:
            break
        here = waiting.popleft()
        if isinstance(here, OWN):
            result.append(here)
            continue
        new = [part for part in _held(here) if id(part) not in known and not isinstance(part, PLAIN)]
        known.update(map(id, new))
        waiting += new
    return result


@contextmanager
def own_generators_kept(generators: Iterable[Any]) -> Iterator[None]:
    """Within the context, draws from these generators leave no trace in them."""
    before = [(generator, _state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            _restore(generator, state)


def _held(thing: Any) -> Iterable[Any]:
    match thing:
        case Mapping():
            return islice(thing.values(), MOST_ELEMENTS) if isinstance(thing, dict) else ()
        case list() | tuple():
            return islice(thing, MOST_ELEMENTS)
        case type() | torch.Tensor() | np.ndarray():
            return ()
    return islice(getattr(thing, "__dict__", {}).values(), MOST_ELEMENTS)


def _state_of(generator: Any) -> Any:
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState() | torch.Generator():
            return generator.get_state()
    return generator.getstate()


def _restore(generator: Any, state: Any) -> None:
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState() | torch.Generator():
            generator.set_state(state)
        case _:
            generator.setstate(state)
