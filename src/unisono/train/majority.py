"""Whether all workers hold the same weights, and which ones do not."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from unisono.errors import JobMismatch
from unisono.train.digest import checksum
from unisono.train.membership import Arrival

_DIGITS = 12  # in hex: such a number travels as a float64 without being rounded


def weights_digest(tensors: Mapping[str, Tensor]) -> int:
    """A quick digest of a worker's weights, above 0 and below 2**49; see :func:`checksum`."""
    return 1 + int(checksum(tensors)[:_DIGITS], 16)


def healing(digests: Sequence[int], step: int) -> Arrival:
    """Who gives whom the right weights, where some workers hold others than most do.

    Args:
        digests: of every worker's weights, by rank.
        step: that they are about to compute.

    Raises:
        JobMismatch: no weights are held by more than half of the workers.
    """
    right, votes = Counter(digests).most_common(1)[0]
    if 2 * votes <= len(digests):
        held = ", ".join(f"rank {rank}: {digest:012x}" for rank, digest in enumerate(digests))
        raise JobMismatch(
            f"step {step}: the workers hold different weights ({held}), and no majority says which are right: a fault "
            f"of a host's memory, or of Unisono's. Start the job again: it goes on from its last checkpoint. With 3 "
            f"workers or more such a fault is healed"
        )
    return Arrival(
        source=digests.index(right),
        acts=[int(digest == right) for digest in digests],
        joiners=frozenset(),
        seconds={},
    )
