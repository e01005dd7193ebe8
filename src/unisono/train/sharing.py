"""Every worker begins with the same weights."""

import warnings

from unisono.errors import UnisonoWarning
from unisono.train.digest import digest_tensors
from unisono.train.prepared import Prepared
from unisono.train.workers import Workers


def share_weights(workers: Workers, prepared: Prepared) -> None:
    """Give every worker the main worker's parameters and buffers; warns where they differed. Collective."""
    if workers.world_size == 1:
        return
    digests = workers.gather_json(digest_tensors(prepared.tensors()))
    if workers.rank == 0 and len(set(digests)) > 1:
        warnings.warn(
            "the workers built models with different weights, and now all have those of rank 0: the next run "
            "would start from others. Build the model after unisono.init, which seeds the random generators",
            UnisonoWarning,
            stacklevel=3,
        )
    seen: set[int] = set()
    places = [place.tensor for place in prepared.buffers]
    for tensor in [*prepared.tensors().values(), *prepared.parameters.values(), *places]:
        if tensor.data_ptr() not in seen and tensor.numel():
            seen.add(tensor.data_ptr())
            workers.transport.broadcast(tensor, 0)
