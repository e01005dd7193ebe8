"""Whether values are finite: their sum tells it at the memory's speed, since NaN and infinities stay in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from unisono.device import HostRead

SHORT = 2**13
"""Elements up to which a call costs more than what it does; a dot product is the cheapest one."""

LONG = 2**18
"""Elements from which values soon leave the cache. Fewer are looked at one by one, with the code in the cache."""

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Finiteness:
    """Looks at values while they are in the cache, and tells later whether all of them are finite."""

    def __init__(self) -> None:
        self._looked: dict[int, tuple[Tensor, Tensor]] = {}

    def look(self, values: Tensor, place: int = -1) -> None:
        """Look at values that stay as they are until somebody has the answer of :meth:`asked`.

        Args:
            values: the values, of any dtype; only floating-point ones can be other than finite.
            place: a number for what they are: what was there before does not count any more.
        """
        if values.is_floating_point():
            self._looked[-1 - len(self._looked) if place < 0 else place] = _sum(values), values

    def asked(self, others: Iterable[Finiteness] = ()) -> Callable[[], bool]:
        """Ask whether all are finite, and all that others have looked at.

        A sum that is not finite may have become too large: then each value is looked at.

        Returns:
            a function that waits for the answer.
        """
        looked = [*self._looked.values(), *(each for other in others for each in other._looked.values())]
        reads = [HostRead(each) for each in _together([found for found, _ in looked])] if looked else []

        def answer() -> bool:
            if all(bool(each.values()) for each in reads):
                return True
            return all(bool(found.isfinite()) or bool(values.isfinite().all()) for found, values in looked)

        return answer

    def forget(self) -> None:
        """Hold nothing of what was looked at."""
        self._looked.clear()


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether these tensors hold no NaN and no infinity."""
    looking = Finiteness()
    for each in tensors:
        looking.look(each.detach())
    return looking.asked()()


def first_not_finite(values: Tensor) -> float | None:
    """The first element that is NaN or infinite, in the order of rows; None if there is none."""
    odd = values.detach().reshape(-1)
    odd = odd[~odd.isfinite()]
    return float(odd[0]) if odd.numel() else None


def _sum(values: Tensor) -> Tensor:
    if values.dim() == 1 and values.numel() <= SHORT and values.dtype not in _WIDE:
        return torch.dot(values, values)
    return values.sum(dtype=_WIDE.get(values.dtype))


def _together(sums: Sequence[Tensor]) -> list[Tensor]:
    """For each device, which is waited for once, whether the sums on it are finite."""
    first = sums[0]
    if all(each.device == first.device and each.dtype == first.dtype for each in sums):
        return [torch.stack([*sums]).isfinite().all()]
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in sums:
        by_device.setdefault(each.device, []).append(each.isfinite())
    return [torch.stack(flags).all() for flags in by_device.values()]
