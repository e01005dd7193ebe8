"""Every worker begins with the same weights."""

import warnings

from torch import Tensor

from unisono.errors import UnisonoWarning
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import Values, digest_tensors


def shared_weights(workers: Workers, prepared: Prepared) -> Values:
    """The main worker's parameters and buffers, each with the tensor here that is to hold it. Collective.

    Nothing is set here. Warns where the workers' weights differ.
    """
    if workers.world_size == 1:
        return []
    digests = workers.gather_json(digest_tensors(prepared.tensors()))
    if workers.rank == 0 and len(set(digests)) > 1:
        warnings.warn(
            "the workers built models with different weights, and now all have those of rank 0: the next run "
            "would start from others. Build the model after unisono.init, which seeds the random generators",
            UnisonoWarning,
            stacklevel=3,
        )
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    buffers = [place.tensor for place in prepared.buffers]
    for tensor in [*prepared.tensors().values(), *prepared.parameters.values(), *buffers]:
        if tensor.data_ptr() not in shared and tensor.numel():
            value = tensor.detach().clone()
            workers.transport.broadcast(value, 0)
            shared[tensor.data_ptr()] = tensor, value
    return list(shared.values())
