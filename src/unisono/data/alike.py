"""Whether two samples are the same."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def alike(one: Any, other: Any) -> bool:
    """Whether two samples hold the same: tensors, arrays, numbers, text and bytes, in lists, tuples and mappings.

    Of other things only the type is compared.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and bool(((one == other) | ((one != one) & (other != other))).all())
        )
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(alike(*pair) for pair in zip(one, other, strict=True))
    return not isinstance(one, int | float | str | bytes) or bool(one == other or (one != one and other != other))
