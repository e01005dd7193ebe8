"""Values that members make known to those who join later, as text."""

import base64
import json
from typing import Any

import safetensors.torch

from unisono.checkpoint.codec import flatten, unflatten
from unisono.errors import CheckpointError, JobError
from unisono.membership.messages import LARGEST_VALUE


def packed(value: Any) -> str:
    """A value as text: numbers, text, tensors, and lists and dicts of them.

    What cannot be made known is replaced by the reason why, for whoever asks for it.
    """
    try:
        skeleton, tensors = flatten(value)
    except CheckpointError as error:
        return unpublishable(str(error))
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > LARGEST_VALUE:
        return unpublishable(f"it is too large, with {size / 2**20:.1f} MiB of tensors")
    data = safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
    text = _text({"skeleton": skeleton, "tensors": base64.b64encode(data).decode()})
    if len(text) > LARGEST_VALUE:
        return unpublishable(f"it is too large, with {len(data) / 2**20:.1f} MiB of tensors")
    return text


def unpublishable(reason: str) -> str:
    """What is made known instead of a value that cannot be."""
    return _text({"unknown": reason})


def unpacked(text: str) -> Any:
    """The inverse of :func:`packed`.

    Raises:
        JobError: the value could not be made known; says why.
    """
    found = json.loads(base64.b64decode(text))
    if "unknown" in found:
        raise JobError(
            f"this worker cannot join: a collective call outside of the training loops had a result that cannot be "
            f"handed on to it: {found['unknown']}. Let such calls return less, or make them after the last loop"
        )
    return unflatten(found["skeleton"], safetensors.torch.load(base64.b64decode(found["tensors"])))


def _text(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()
