"""CIFAR-10's binary format, read from small files of the real layout, and all that can be wrong with it."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.cifar10_images import RECORD_BYTES, TEST_FILES, TRAIN_FILES, Cifar10, SyntheticCifar10
from unisono.errors import DataError

pytestmark = pytest.mark.unit

RECORDS = 4


def records_of(file_number: int) -> np.ndarray:
    records = np.random.default_rng(file_number).integers(0, 256, (RECORDS, RECORD_BYTES), dtype=np.uint8)
    records[:, 0] %= 10
    return records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate(TRAIN_FILES + TEST_FILES):
        records_of(number).tofile(folder / name)
    return folder


def refusal(folder: Path, train: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        Cifar10(folder, train=train)
    return str(caught.value)


def test_images_come_in_file_order_as_channels_rows_columns(folder: Path) -> None:
    records_of(1)[:1].tofile(folder / TRAIN_FILES[1])  # files may have different numbers of records
    expected = [record for number in range(5) for record in records_of(number)[: 1 if number == 1 else RECORDS]]
    dataset = Cifar10(folder.parent)
    assert len(dataset) == len(expected)
    for index, record in enumerate(expected):
        image, label = dataset[index]
        assert (image.dtype, image.shape, type(label), label) == (torch.uint8, (3, 32, 32), int, record[0])
        red, green, blue = record[1:].reshape(3, 32, 32)
        assert np.array_equal(image.numpy(), np.stack([red, green, blue]))
    assert np.array_equal(Cifar10(folder, train=False)[2][0].numpy().ravel(), records_of(5)[2, 1:])


def test_indices_behave_as_those_of_a_list(folder: Path) -> None:
    dataset = Cifar10(folder)
    assert torch.equal(dataset[-1][0], dataset[len(dataset) - 1][0])
    for beyond in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[beyond]


def test_changing_an_image_leaves_the_file_and_the_next_read_alone(folder: Path) -> None:
    dataset = Cifar10(folder)
    before = dataset[0][0].clone()
    dataset[0][0].zero_()
    assert torch.equal(dataset[0][0], before)


def test_a_loader_process_gets_the_path_not_the_images(folder: Path) -> None:
    sent = pickle.dumps(Cifar10(folder, train=False))
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[3][0], Cifar10(folder, train=False)[3][0])  # noqa: S301 - our own bytes


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "data_batch_3.bin").unlink()
    assert "lacks data_batch_3.bin" in refusal(folder)
    assert len(Cifar10(folder, train=False)) == RECORDS


@pytest.mark.parametrize(
    ("there", "named", "words"),
    [
        ("", "nowhere", "no folder .*nowhere.*cifar-10-binary.tar.gz"),
        ("", "", "data_batch_1.bin"),
        ("cifar-10-batches-py/data_batch_1", "", "pickled.*cifar-10-binary.tar.gz"),
        ("cifar-10-batches-py/data_batch_1", "cifar-10-batches-py", "pickled.*cifar-10-binary.tar.gz"),
        ("cifar-10-python.tar.gz", "", "pickled.*cifar-10-binary.tar.gz"),
        ("cifar-10-python.tar.gz", "cifar-10-python.tar.gz", "pickled.*cifar-10-binary.tar.gz"),
        ("cifar-10-binary.tar.gz", "", "unpack it"),
        ("cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz", "unpack it"),
        ("data_batch_1.bin", "data_batch_1.bin", "not a folder"),
    ],
)
def test_what_is_no_folder_of_the_binary_version_is_named_with_what_to_do(
    there: str, named: str, words: str, tmp_path: Path
) -> None:
    if there:
        (tmp_path / there).parent.mkdir(exist_ok=True)
        (tmp_path / there).write_bytes(b"")
    assert re.search(words, refusal(tmp_path / named), re.DOTALL)


@pytest.mark.parametrize("size", [0, 1, RECORD_BYTES - 1, RECORDS * RECORD_BYTES + 1])
def test_a_file_of_the_wrong_size_is_named_with_its_size_and_the_expected_one(folder: Path, size: int) -> None:
    (folder / "data_batch_2.bin").write_bytes(bytes(size))
    assert re.search(rf"data_batch_2\.bin.*\b{size} bytes.*3073", refusal(folder), re.DOTALL)


def test_a_label_that_is_none_is_named_with_file_and_record(folder: Path) -> None:
    records = records_of(3)
    records[2, 0] = 10
    records[3, 0] = 255
    records.tofile(folder / "data_batch_4.bin")
    message = refusal(folder)
    assert "data_batch_4.bin: record 2 has the label 10" in message
    assert "2 of 4 records" in message


def test_synthetic_images_have_the_shape_of_real_ones_and_depend_on_seed_and_index_alone() -> None:
    dataset = SyntheticCifar10(100, seed=3)
    image, label = dataset[7]
    assert (image.dtype, tuple(image.shape), type(label)) == (torch.uint8, (3, 32, 32), int)
    again = SyntheticCifar10(10**9, seed=3)  # the size is not part of the arithmetic, and costs nothing
    assert torch.equal(again[7][0], image)
    assert again[7][1] == label
    assert not torch.equal(SyntheticCifar10(100, seed=4)[7][0], image)
    assert not torch.equal(dataset[8][0], image)
    assert {dataset[index][1] for index in range(100)} == set(range(10))
    with pytest.raises(IndexError):
        dataset[100]


def test_synthetic_images_stay_the_same_from_release_to_release() -> None:
    image, label = SyntheticCifar10(1, seed=0)[0]
    assert (label, image.sum().item(), image.ravel()[:4].tolist()) == (5, 384093, [185, 62, 179, 119])


def test_synthetic_classes_can_be_told_apart_and_a_second_seed_is_a_held_out_set() -> None:
    def stacked(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        samples = list(SyntheticCifar10(400, seed=seed))  # type: ignore[call-overload]
        return torch.stack([image for image, _ in samples]).float().flatten(1), torch.tensor([y for _, y in samples])

    images, labels = stacked(seed=0)
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])
    held_out, expected = stacked(seed=1)
    assert torch.equal(torch.cdist(held_out, means).argmin(1), expected)
