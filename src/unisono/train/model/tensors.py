"""Tensors of weights: what they are set to, their digest, and a guard against changes by others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.checkpoint.layout import form_of
from unisono.checkpoint.quick_digest import sums_of_words
from unisono.errors import CheckpointError, ModelError
from unisono.train.model.slices import whole_of
from unisono.train.model.staging import mark_owners, whole_of_owner

# Tensors, and what they are to be.

Values = Sequence[tuple[Tensor, Tensor]]
"""Tensors of a model or an optimizer, each with the value that it is to have."""


@torch.no_grad()
def set_all(values: Values) -> None:
    """Set every tensor to its value; one of another shape gets that of the value."""
    for tensor, value in values:
        if tensor.shape == value.shape:
            tensor.copy_(value)
        else:  # other memory: what somebody looks at cannot grow
            tensor.set_(value.clone())  # type: ignore[call-overload]


def set_like(tensors: Sequence[Tensor], found: Any, what: str) -> None:
    """Set tensors to those that were kept of them.

    Raises:
        CheckpointError: these are others; says what they are. Then nothing has changed.
    """
    if not isinstance(found, list | tuple) or not all(isinstance(value, Tensor) for value in found):
        raise CheckpointError(f"the {what} of the strategy that was kept is no list of tensors")
    if [form_of(value) for value in found] != [form_of(tensor) for tensor in tensors]:
        raise CheckpointError(f"the {what} of the strategy that was kept is of another model")
    set_all(list(zip(tensors, found, strict=True)))


def version_of(tensor: Tensor, name: str = "a weight, a buffer or further state") -> int:
    """The number of writes into a tensor that torch has counted.

    Args:
        tensor: the tensor.
        name: its name for people.

    Raises:
        ModelError: torch counts none; names the tensor, and says what to do.
    """
    try:
        return tensor._version
    except RuntimeError:
        raise ModelError(
            f"{name} was made in torch.inference_mode, where torch counts no writes to a tensor: make it in "
            f"torch.no_grad, or make a .clone() of it outside"
        ) from None


# One number for all weights.


def digest(module: nn.Module) -> str:
    """The sha256 of a module's parameters and buffers, in hex.

    Covers names, dtypes, shapes and every bit of the values of ``module.state_dict()``, on any device.
    """
    return digest_tensors(tensors_of(module))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers by name."""
    found = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    mark_owners(module, found)
    return found


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of named tensors, in hex."""
    return _sha256(f"{name}:{tensor_digest(tensor)}\n".encode() for name, tensor in tensors.items())


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A quick digest of named tensors, in hex: names, dtypes, shapes, and the sum of each one's words.

    It finds any single word that differs, at the speed of memory; it is no proof that all bits are equal.
    """
    sums = sums_of_words([*tensors.values()])
    each = zip(tensors.items(), sums, strict=True)
    parts = (f"{name}:{tensor.dtype}{list(tensor.shape)}:{words}\n" for (name, tensor), words in each)
    return hashlib.blake2b("".join(parts).encode(), digest_size=16).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """The sha256 of one tensor's dtype, shape and bits, in hex."""
    owned = whole_of_owner(tensor)
    data = (whole_of(tensor) if owned is None else owned).detach().cpu().contiguous()
    header = f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}".encode()
    # An empty or 0-dim tensor has no last dimension to view as bytes.
    values = data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b""
    return _sha256([header, values])


def _sha256(parts: Iterable[bytes | memoryview]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


# Weights that only the run may change.


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether anything but this tensor holds its memory: another tensor, a NumPy array, a graph."""
    storage = tensor.untyped_storage()
    return not COUNTS_HOLDERS or torch._C._storage_Use_Count(storage._cdata) > _OWN_HOLDERS


COUNTS_HOLDERS = hasattr(torch._C, "_storage_Use_Count")
"""Whether this version of torch says how many hold a tensor's memory."""

_OWN_HOLDERS = 2
"""A tensor, and the object by which Python knows its storage."""


class Untouched:
    """Notices when the script changes weights of which the run has copies elsewhere.

    Args:
        weights: the parameters.
        why: they must not be changed, as a sentence.
    """

    def __init__(self, weights: Sequence[Tensor], why: str) -> None:
        self._weights, self._why = weights, why
        self.accept()

    def accept(self) -> None:
        """They are as they should be."""
        self._versions = [weight._version for weight in self._weights]

    def require(self) -> None:
        """Refuse weights that were changed since they were accepted.

        Raises:
            ModelError: says why, and what to do.
        """
        if self._versions != [weight._version for weight in self._weights]:
            about = "the script has changed weights between two steps"
            raise ModelError(f"{about}. {self._why}: do it before run.prepare, or go without")
