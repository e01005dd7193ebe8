"""accelerate: whoever imports this before anything that loads it is told what is missing."""

from importlib.metadata import version
from importlib.util import find_spec

from unisono.errors import JobError

OLDEST = (1, 10)

_CURE = "pip install 'unisono[accelerate]', or in a clone of Unisono pip install '.[accelerate]'"

if find_spec("accelerate") is None:
    raise JobError(f"unisono.accelerate needs accelerate, which is not installed: {_CURE}")

if tuple(map(int, version("accelerate").split(".")[:2])) < OLDEST:
    raise JobError(
        f"unisono.accelerate needs accelerate {OLDEST[0]}.{OLDEST[1]} or newer, and {version('accelerate')} is "
        f"installed: {_CURE}"
    )
