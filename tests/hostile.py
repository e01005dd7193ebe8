"""What somebody writes into a checkpoint or says over a connection to have more than a value come of it."""

import json
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch

from unisono.checkpoint.codec import flatten
from unisono.checkpoint.tensor_bytes import copies, pieces

HUGE = [2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -1, -(2**63)]
DTYPES = ["|O", "O", "O8", "i4,O", "<V8", "|V16", "V99999999999", "U0", "<U0", "|S0", "<U1", "<U999999999", ">U3"]
DTYPES += ["<f8", ">f4", "<f16", "<c32", "|b1", "?", "<M8", "<M8[0s]", "<M8[7s]", "<M8[99999999s]", "<m8[x]", "f8", ""]
DTYPES += ["(1000000000,)f8", "f8,f8", "<f3", "<i99", "object", "np.float64", "\x00", "é", "bool", "<T", "|S999999999"]
NAMES = ["load", "__dict__", "_dynamo", "onnx", "float32", "qint8", "bool", "complex128", "float8_e8m0fnu", "bits16"]
WORDS = ["", "~", "a", "w", "bytes", "flags", "text", "absent", "__metadata__", "\x00", "\ud800", "x" * 300, "cuda:9"]
WORDS += ["cuda:99999", "privateuseone", "meta", "cpu:-1", "7ff8000000000000", "7ff8", "zz", "41" * 8, "0"]
KINDS = ["tuple", "shape", "set", "frozenset", "deque", "counter", "bytes", "float", "complex", "dtype", "device"]
KINDS += ["tensor", "pairs", "array", "number", "ordered", "items", "pickle", "object", "", "~"]
PIECES = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\ud800", b"\xff", b"NaN", b"Infinity", b"1e999", b"-0.0"]
PIECES += [b"9" * 400, b"9" * 5000, b'{"~":', b'["tensor"', b'"|O"', b"null", b"[" * 3000, b"\x00", b"-1", b"true"]


def example() -> dict[str, Any]:
    """A state that has something of everything that is kept."""
    return {
        "w": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "b": [torch.tensor(1.5), torch.empty(0, 3), torch.tensor([True, False])],
        "bytes": np.arange(6.0).reshape(2, 3),
        "text": np.array(["a", "bc"]),
        "flags": np.array([True, False]),
        "numbers": (np.float32(1.5), np.datetime64(3, "s"), np.str_("é")),
        "o": OrderedDict({1: float("nan"), (2, "x"): complex(0.0, float("inf"))}),
        "d": deque([b"ab", torch.bfloat16, torch.device("cpu")], maxlen=5),
        "s": {1, "a", None, frozenset([True])},
        "c": Counter({"a": 2}),
        "z": torch.Size([2, 0]),
    }


def tensors_to_choose() -> dict[str, torch.Tensor]:
    """Those that hostile skeletons refer to."""
    return {
        "w": torch.randn(2, 3, 4, 4),
        "a": torch.zeros(3),
        "bytes": torch.arange(48, dtype=torch.uint8),
        "flags": torch.tensor([0, 1, 2, 255], dtype=torch.uint8),
        "text": torch.full((8,), 255, dtype=torch.uint8),
        "": torch.empty(0, dtype=torch.uint8),
    }


def skeleton(chance: Random, depth: int = 0) -> Any:
    """Something like what stands for a state."""
    if depth > 5 or chance.random() < 0.25:
        return leaf(chance)
    match chance.randrange(6):
        case 0:
            return [skeleton(chance, depth + 1) for _ in range(chance.randrange(4))]
        case 1:
            return {chance.choice(WORDS): skeleton(chance, depth + 1) for _ in range(chance.randrange(4))}
        case 2:
            return {"~": skeleton(chance, depth + 1)}
        case _:
            return {"~": _marked(chance, depth + 1)}


def leaf(chance: Random) -> Any:
    """A value that JSON has."""
    small: list[Any] = [None, True, False, 0, 1, -0.0, 1.5, 1e308, float("inf"), float("nan"), [], {}]
    return chance.choice([chance.choice(small), chance.choice(HUGE), chance.choice(WORDS), chance.choice(DTYPES)])


def sizes(chance: Random) -> Any:
    """A shape, or strides."""
    odd: list[Any] = [*HUGE, 1.0, None, "3", [2]]
    few = [chance.choice([0, 1, 2, 3, 4, 6, 8, 48, chance.choice(odd)]) for _ in range(chance.randrange(5))]
    return chance.choice([few, few, few, [1] * 70, leaf(chance)])


def mutated(chance: Random, data: bytes, pieces: Sequence[bytes] = PIECES) -> bytes:
    """The same with something wrong, mostly."""
    text = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(4):
            case 0:
                text[at : at + chance.randrange(8)] = chance.choice(pieces)
            case 1:
                text[at:at] = chance.randbytes(3)
            case 2:
                del text[at : at + chance.randrange(20)]
            case 3 if at < len(text):
                text[at] ^= 1 << chance.randrange(8)
    return bytes(text)


def changed(chance: Random, value: Any) -> Any:
    """A JSON value with one part exchanged."""
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [changed(chance, part) if number == at else part for number, part in enumerate(value)]
    if isinstance(value, dict) and value and chance.random() < 0.9:
        at = chance.choice(list(value))
        return {key: changed(chance, part) if key == at else part for key, part in value.items()}
    return chance.choice([leaf, sizes, skeleton])(chance)


def as_text(value: Any) -> bytes:
    """As it travels."""
    return json.dumps(value).encode()


def safetensors_of(tree: Any) -> tuple[Any, bytes]:
    """What stands for a state: its skeleton, and the content of the file with its tensors."""
    told, tensors = flatten(tree)
    return told, b"".join(pieces(copies(tensors)))


def header(chance: Random) -> bytes:
    """Something like a safetensors file."""
    dtypes = ["F32", "BOOL", "U8", "F64", "C64", "F8_E8M0", "F4", "O", "", 3, None]
    entries: dict[str, Any] = {}
    end = 0
    for _ in range(chance.randrange(4)):
        size = chance.choice([0, 4, 8, 16, *HUGE])
        begin = chance.choice([end, end, end, 0, *HUGE])
        form = {"dtype": chance.choice(dtypes), "shape": sizes(chance), "data_offsets": [begin, begin + size]}
        entries[chance.choice(WORDS)] = changed(chance, form) if chance.random() < 0.2 else form
        end = begin + size
    text = json.dumps(entries).encode()
    told = chance.choice([len(text), len(text), len(text), *HUGE])
    return (told % 2**64).to_bytes(8, "little") + text + chance.randbytes(chance.choice([0, 4, 16, 64]))


def _marked(chance: Random, depth: int) -> list[Any]:
    kind = chance.choice(KINDS)
    match kind:
        case "tensor":
            return [kind, chance.choice(WORDS), *[sizes(chance) for _ in range(chance.randrange(3))]]
        case "array":
            names = [chance.choice(WORDS) for _ in range(chance.randrange(3))]
            return [kind, chance.choice(DTYPES), sizes(chance), *names]
        case "number":
            return [kind, chance.choice(DTYPES), chance.choice(["41" * n for n in (0, 1, 4, 8, 16)] + WORDS)]
        case "dtype":
            return [kind, chance.choice(NAMES)]
    return [kind, *[skeleton(chance, depth) for _ in range(chance.choice([0, 1, 1, 1, 2, 3]))]]
