"""Values that members make known to those who join later, as text."""

import base64
import json
from typing import Any

import safetensors.torch

from unisono.checkpoint.codec import flatten, unflatten
from unisono.checkpoint.tensors import tensors_of
from unisono.errors import CheckpointError, JobError, Unreadable
from unisono.membership.messages import LARGEST_VALUE
from unisono.received import parse_object


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
        CheckpointError: the text is none of :func:`packed`.
    """
    try:
        found = parse_object(_decoded(text))
    except Unreadable as error:
        raise CheckpointError(f"a value that was made known cannot be read: {error}") from error
    match found:
        case {"unknown": str(reason)}:
            raise JobError(
                f"this worker cannot join: a collective call outside of the training loops had a result that cannot "
                f"be handed on to it: {reason}. Let such calls return less, or make them after the last loop"
            )
        case {"skeleton": skeleton, "tensors": str(encoded)}:
            return unflatten(skeleton, tensors_of(_decoded(encoded)))
    raise CheckpointError("a value that was made known has neither tensors nor a reason why it is unknown")


def _text(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise CheckpointError(f"a value that was made known is no base64: {error}") from error
