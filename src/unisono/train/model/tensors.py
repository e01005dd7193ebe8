"""Tensors of weights: what they are set to, their digest, and a guard against changes by others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.checkpoint.tensor_bytes import form_of
from unisono.errors import CheckpointError, ModelError
from unisono.train.model.slices import whole_of
from unisono.train.model.staging import mark_owners, whole_of_owner
from unisono.word_sums import sums_of_words

# Setting tensors to values.

Values = Sequence[tuple[Tensor, Tensor]]
"""Tensors of a model or an optimizer, each with the value that it is to have."""


@torch.no_grad()
def set_all(values: Values) -> None:
    """Set every tensor to its value; one of another shape gets that of the value."""
    for tensor, value in values:
        if tensor.shape == value.shape:
            tensor.copy_(value)
        else:  # with memory of its own: memory that a view or an array shares cannot grow
            tensor.set_(value.clone())  # type: ignore[call-overload]


def set_like(tensors: Sequence[Tensor], values: Any, name: str) -> None:
    """Set tensors of a strategy to the values that were kept of them.

    Raises:
        CheckpointError: their number, dtypes or shapes differ; nothing is changed then.
    """
    if not isinstance(values, list | tuple) or not all(isinstance(value, Tensor) for value in values):
        raise CheckpointError(f"the {name} of the strategy that was kept is no list of tensors")
    if [form_of(value) for value in values] != [form_of(tensor) for tensor in tensors]:
        raise CheckpointError(f"the {name} of the strategy that was kept is of another model")
    set_all(list(zip(tensors, values, strict=True)))


def version_of(tensor: Tensor, name: str = "a weight, a buffer or further state") -> int:
    """The number of writes into a tensor that torch has counted.

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


# Digests of weights.


def digest(module: nn.Module) -> str:
    """The sha256 of a module's parameters and buffers, in hex.

    Covers names, dtypes, shapes and every bit of the values of ``module.state_dict()``, on any device.
    """
    return digest_tensors(tensors_of(module))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers by name."""
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    mark_owners(module, tensors)
    return tensors


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of named tensors, in hex."""
    return _sha256(f"{name}:{tensor_digest(tensor)}\n".encode() for name, tensor in tensors.items())


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A quick digest of named tensors, in hex: names, dtypes, shapes, and the sum of each one's words.

    It reveals any single word that differs, at the speed of memory; it is no proof that all bits are equal.
    """
    sums = sums_of_words([*tensors.values()])
    rows = zip(tensors.items(), sums, strict=True)
    parts = (f"{name}:{tensor.dtype}{list(tensor.shape)}:{words}\n" for (name, tensor), words in rows)
    return hashlib.blake2b("".join(parts).encode(), digest_size=16).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """The sha256 of one tensor's dtype, shape and bits, in hex."""
    staged = whole_of_owner(tensor)
    data = (whole_of(tensor) if staged is None else staged).detach().cpu().contiguous()
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
    """Whether another object holds this tensor's memory: another tensor, a NumPy array, a graph."""
    storage = tensor.untyped_storage()
    return not COUNTS_HOLDERS or torch._C._storage_Use_Count(storage._cdata) > _OWN_HOLDERS


COUNTS_HOLDERS = hasattr(torch._C, "_storage_Use_Count")
"""Whether this version of torch tells how many objects hold a tensor's memory."""

_OWN_HOLDERS = 2
"""The tensor itself, and Python's object for its storage."""


class Untouched:
    """Refuses weights that the script has changed, although the run has copies of them elsewhere.

    ``why`` says why they must not be changed.
    """

    def __init__(self, weights: Sequence[Tensor], why: str) -> None:
        self._weights, self._why = weights, why
        self.accept()

    def accept(self) -> None:
        """Take the weights as they are now for unchanged."""
        self._versions = [weight._version for weight in self._weights]

    def require(self) -> None:
        """Refuse weights that were changed since they were accepted.

        Raises:
            ModelError: says why, and what to do.
        """
        if self._versions != [weight._version for weight in self._weights]:
            reason = "the script has changed weights between two steps"
            raise ModelError(f"{reason}. {self._why}: change weights before run.prepare only")
