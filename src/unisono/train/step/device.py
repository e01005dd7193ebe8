"""Where a worker computes, and how a batch gets there."""

from typing import Any

import torch
from torch import Tensor

from unisono.data.leaves import replaced
from unisono.errors import JobError


def choose_device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    """The device of a worker: the wanted one, else a GPU by local rank if there is one, else the CPU.

    Workers beyond the number of GPUs share them.

    Raises:
        JobError: there is no such device.
    """
    has_cuda: bool = torch.cuda.is_available()
    if wanted is None:
        wanted = "cuda" if has_cuda else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise JobError(f"device={wanted!r}: {str(error).splitlines()[0]}") from None
    if device.type != "cuda":
        return device
    if not has_cuda:
        raise JobError(f"device={wanted!r}: torch {torch.__version__} sees no CUDA device here; use device='cpu'")
    index: int | None = device.index
    device = torch.device("cuda", local_rank % torch.cuda.device_count() if index is None else index)
    torch.cuda.set_device(device)
    return device


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with all its tensors on ``device``: tensors, and tuples, lists and mappings of them."""
    return replaced(batch, Tensor, lambda tensor: tensor.to(device, non_blocking=True))
