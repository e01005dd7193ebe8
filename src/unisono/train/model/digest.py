"""One number for all weights."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from unisono.words import sum_of_words


def digest(module: nn.Module) -> str:
    """The sha256 of a module's parameters and buffers, in hex.

    Covers names, dtypes, shapes and every bit of the values of ``module.state_dict()``, on any device.
    """
    return digest_tensors(tensors_of(module))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers by name."""
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of named tensors, in hex."""
    return _sha256(f"{name}:{tensor_digest(tensor)}\n".encode() for name, tensor in tensors.items())


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A quick digest of named tensors, in hex: names, dtypes, shapes, and the sum of each one's words.

    It finds any single word that differs, at the speed of memory; it is no proof that all bits are equal.
    """
    parts = (f"{name}:{tensor.dtype}{list(tensor.shape)}:{sum_of_words(tensor)}\n" for name, tensor in tensors.items())
    return hashlib.blake2b("".join(parts).encode(), digest_size=16).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """The sha256 of one tensor's dtype, shape and bits, in hex."""
    data = tensor.detach().cpu().contiguous()
    header = f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}".encode()
    # An empty or 0-dim tensor has no last dimension to view as bytes.
    values = data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b""
    return _sha256([header, values])


def _sha256(parts: Iterable[bytes | memoryview]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()
