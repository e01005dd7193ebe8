"""CIFAR-10 in its binary version, memory-mapped, and a synthetic data set of the same shape.

A record of the binary version is 3073 bytes: the label, then 1024 bytes each of red, green and blue. There
is nothing in it to decode, let alone to execute, which is why the pickled Python version is not read.
"""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unisono.errors import DataError

CLASSES = 10
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
BINARY_FOLDER = "cifar-10-batches-bin"
BINARY_ARCHIVE = "cifar-10-binary.tar.gz"
PICKLED_NAMES = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1", "test_batch")

HOW_TO_GET = (
    "Get the binary version:\n"
    f"  curl -O https://www.cs.toronto.edu/~kriz/{BINARY_ARCHIVE} && tar xf {BINARY_ARCHIVE}\n"
    f"and name the folder {BINARY_FOLDER} that it makes."
)


class Cifar10(Dataset[tuple[Tensor, int]]):
    """The CIFAR-10 images: ``dataset[i]`` is (uint8 tensor of shape (3, 32, 32), label in 0 … 9).

    Args:
        folder: ``cifar-10-batches-bin``, or the folder it lies in.
        train: the 50 000 images of the five training files, or else the 10 000 of the test file.

    Raises:
        DataError: a file is missing, has a size that is no whole number of records, or holds a label that is
            none; or the folder has the pickled Python version.
    """

    def __init__(self, folder: str | Path, train: bool = True) -> None:
        self.folder = _binary_folder(Path(folder).expanduser())
        self.train = train
        self._files = [_open(path) for path in _existing(self.folder, TRAIN_FILES if train else TEST_FILES)]
        self._ends = list(accumulate(len(records) for records in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        position = range(len(self))[index]  # negative indices and IndexError as a list has them
        number = bisect_right(self._ends, position)
        record = self._files[number][position - self._ends[number]]  # counted from the file's end
        return torch.from_numpy(record[1:].copy()).view(SHAPE), int(record[0])

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's process that is not forked opens the files again; the default would send it every image.
        return type(self), (self.folder, self.train)


class SyntheticCifar10(Dataset[tuple[Tensor, int]]):
    """Images of CIFAR-10's shape from arithmetic on the index: a faint pattern of their class under noise.

    The classes look alike under every seed, so that another seed is a held-out set for the same task.

    Args:
        samples: how many images there are, at least 1.
        seed: which images they are.

    Raises:
        DataError: ``samples`` is less than 1.
    """

    def __init__(self, samples: int, seed: int = 0) -> None:
        if samples < 1:
            raise DataError(f"SyntheticCifar10 needs samples >= 1, not {samples}.")
        self.samples = samples
        self.seed = seed
        self._patterns = _patterns()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        position = range(self.samples)[index]
        noise = _scramble(np.arange(RECORD_BYTES, dtype=np.uint64), key=(self.seed, position))
        label = int(noise[0] % CLASSES)
        pixels = (self._patterns[label] + 3 * (noise[1:] % 256)) // 4
        return torch.from_numpy(pixels.astype(np.uint8)).view(SHAPE), label


def _binary_folder(folder: Path) -> Path:
    if folder.is_file():
        raise DataError(f"{folder} is a file, not a folder. {_advice(folder.name)}")
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}. {HOW_TO_GET}")
    return folder / BINARY_FOLDER if (folder / BINARY_FOLDER).is_dir() else folder


def _existing(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The files of these names in the folder, or the error that says what is there instead."""
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in names]
    if len(missing) < len(names):
        raise DataError(f"{folder} lacks {', '.join(missing)}: it was not unpacked completely. {HOW_TO_GET}")
    hint = next((name for name in (*PICKLED_NAMES, BINARY_ARCHIVE) if (folder / name).exists()), folder.name)
    raise DataError(f"{folder} has none of CIFAR-10's binary files ({', '.join(names)}). {_advice(hint)}")


def _advice(found: str) -> str:
    """What to do, seeing a file or folder of this name where the binary files were looked for."""
    if found in PICKLED_NAMES:
        return (
            f"{found} is the Python version, which is pickled: reading it would execute whatever is in it, "
            f"so Unisono does not. {HOW_TO_GET}"
        )
    if found == BINARY_ARCHIVE:
        return f"{found} is the right archive: unpack it (tar xf {found}) and name the folder {BINARY_FOLDER}."
    return HOW_TO_GET


def _open(path: Path) -> npt.NDArray[np.uint8]:
    """The file's records, memory-mapped: uint8 of shape (records, 3073)."""
    size = path.stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise DataError(
            f"{path} has {size} bytes, which is not a whole number of records of {RECORD_BYTES} bytes "
            f"(the published file has {10_000 * RECORD_BYTES}): truncated, or another format. {HOW_TO_GET}"
        )
    records = np.memmap(path, dtype=np.uint8, mode="r", shape=(size // RECORD_BYTES, RECORD_BYTES))
    wrong = np.flatnonzero(records[:, 0] >= CLASSES)
    if wrong.size:
        raise DataError(
            f"{path}: record {wrong[0]} has the label {records[wrong[0], 0]}, labels are 0 … {CLASSES - 1}"
            f" ({wrong.size} of {len(records)} records are wrong): damaged, or another format. {HOW_TO_GET}"
        )
    return records


def _patterns() -> npt.NDArray[np.uint64]:
    """One pattern per class in blocks of 8 by 8 pixels, so that a crop or a shift keeps most of it."""
    blocks = _scramble(np.arange(CLASSES * 3 * 4 * 4, dtype=np.uint64), key=(-1, 0)) % 256
    pixels = blocks.reshape(CLASSES, 3, 4, 4).repeat(8, axis=2).repeat(8, axis=3)
    return pixels.reshape(CLASSES, RECORD_BYTES - 1)


def _scramble(counters: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """64 well-mixed bits per counter (splitmix64): the same under every version of numpy."""
    start = (key[0] * 0xD1342543DE82EF95 + key[1] * 0x2545F4914F6CDD1D) % 2**64
    mixed = (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
