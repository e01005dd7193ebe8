"""A script that trains on data of another library, of the kind ``STREAM``, in the uneven files of the folder ``FILES``.

What was trained on is counted in state of the run: as atomic as the weights.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
import torch.nn.functional as F
import webdataset
from datasets import Dataset, IterableDataset
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

import unisono

tqdm.monitor_interval = 0  # or bars of progress leave a thread
BATCH, EPOCHS = 48, 2
FOLDER = Path(os.environ["FILES"])
PARQUET = sorted(map(str, FOLDER.glob("*.parquet")))


class Seen:
    """The ids of all samples of an epoch, in the order of shards."""

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []


def with_noise(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "inputs": (torch.tensor(row["inputs"]) + 0.1 * torch.randn(4)).tolist()}


def rows(files: list[str]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from pyarrow.parquet.read_table(file).to_pylist()


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "inputs": row["inputs"].float() + 0.1 * torch.randn(4)}


def parquet() -> IterableDataset:
    # Not load_dataset: workers that are threads would share its file systems, and their locks.
    return IterableDataset.from_generator(rows, gen_kwargs={"files": PARQUET})


def streamed(stream: IterableDataset) -> IterableDataset:
    stream = stream.with_format("torch")
    # All streams of a process share it, and so do workers that are threads, some of which fill it while others copy.
    del stream.__dict__["_IterableDataset__hffs_cache"]
    return stream


def tar_files() -> Any:
    files = sorted(map(str, FOLDER.glob("*.tar")))
    stream = webdataset.WebDataset(files, shardshuffle=False).shuffle(10, seed=3).decode()
    return stream.to_tuple("number.cls", "inputs.json").map_tuple(int, torch.tensor).map(named)


def named(pair: Any) -> dict[str, Any]:
    return {"number": pair[0], "inputs": pair[1]}


streams: dict[str, Callable[[], Any]] = {
    "hugging-face": lambda: streamed(parquet().shuffle(seed=3, buffer_size=10).map(with_noise)),
    "hugging-face-map": lambda: Dataset.from_dict(
        {name: [row[name] for row in parquet()] for name in ("number", "inputs")}
    ).with_format("torch"),
    "webdataset": tar_files,
    "arrow": lambda: unisono.ArrowStream(PARQUET, window=2, transform=noisy),
    "stateful-loader": lambda: StatefulDataLoader(streamed(parquet().map(with_noise)), BATCH),
}

run = unisono.init(batch_size=BATCH, shards=6, seed=3, faults={"timeout_s": 30}, arithmetic={"threads": 1})
model, seen = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 5)), Seen()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.prepare(model, optimizer, state={"seen": (seen, {"ids": "cat"})})


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    seen.ids.append(batch["number"])
    return F.cross_entropy(model(batch["inputs"]), batch["number"] % 5)


with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", ResourceWarning
    )  # webdataset leaves it to the collector to close what it has opened
    for step in run.steps(streams[os.environ["STREAM"]](), epochs=EPOCHS):
        step.run(loss_of)
        if step.is_last_in_epoch:
            ids = torch.cat(seen.ids).tolist()
            often = sorted(set(Counter(ids).values()))
            run.print(f"epoch {step.epoch}: {len(ids)} samples, {len(set(ids))} different ones, {often} times, {ids}")
            seen.ids = []
run.finish()
