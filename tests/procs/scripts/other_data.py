"""A script whose data are of the kind ``DATA``, and drawn with the seed ``DRAWN``, or without one where it is empty."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import unisono

drawn = np.random.default_rng(int(os.environ["DRAWN"]) if os.environ["DRAWN"] else None)
fixed = torch.Generator().manual_seed(0)
WHOLE = TensorDataset(torch.randn(120, 4, generator=fixed), torch.arange(120) % 3)


class Made(Dataset[Any]):
    """Made with random numbers; or with a generator of its own, whenever a sample is asked for."""

    def __init__(self, *, late: bool = False) -> None:
        self.noise = torch.from_numpy(drawn.normal(size=(96, 4)).astype(np.float32))
        self.own = drawn if late else None

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        late = 0.0 if self.own is None else float(self.own.normal())
        return WHOLE[index][0] + self.noise[index] + late, WHOLE[index][1]


class Mixed(IterableDataset[Any]):
    """A stream whose order was drawn when it was made: in one process it is the same whenever it is read."""

    def __init__(self) -> None:
        self.order = drawn.permutation(96).tolist()

    def __iter__(self) -> Iterator[Any]:
        for index in self.order:
            yield WHOLE[index][0] + 0.1 * torch.randn(4), WHOLE[index][1]


class Odd(Dataset[Any]):
    """Its samples hold what is another thing in each process, and no other sample: of a folder, an object, a set."""

    def __init__(self) -> None:
        self.folder, self.opened = Path(mkdtemp()), 0
        self.folder.rmdir()

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        self.opened += 1
        inputs, label = WHOLE[index]
        if index % 7 == 0:
            inputs = torch.where(inputs > 1, float("nan"), inputs)
        names = {f"name {number}" for number in range(4)}
        about = {name: len(name) for name in (sorted(names) if drawn.random() < 0.5 else sorted(names, reverse=True))}
        return {
            "inputs": inputs + 0.1 * torch.randn(4),
            "label": label,
            "path": str(self.folder / f"{index}.png"),
            "file": self.folder / f"{index}.png",
            "lock": object(),
            "read": iter([index]),
            "about": about,
        }


def collate(samples: list[Any]) -> Any:
    return torch.stack([each["inputs"].nan_to_num() for each in samples]), torch.stack(
        [each["label"] for each in samples]
    )


def data() -> Any:
    match os.environ["DATA"]:
        case "split":
            return Subset(WHOLE, drawn.permutation(120)[:96].tolist())
        case "made":
            return Made()
        case "processes":
            return DataLoader(Made(), batch_size=24, num_workers=1)
        case "late":
            return Made(late=True)
        case "stream":
            return Mixed()
        case "read ahead":
            return DataLoader(Mixed(), batch_size=24, num_workers=1)
        case "odd":
            return DataLoader(Odd(), batch_size=24, collate_fn=collate)
    return WHOLE


run = unisono.init(batch_size=24, shards=6, seed=3, faults={"timeout_s": 30}, arithmetic={"threads": 1})
model = nn.Linear(4, 3)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


if os.environ["DATA"] == "evaluated":
    held_out = Subset(WHOLE, drawn.permutation(120)[:24].tolist())
    run.evaluate(held_out, lambda model, batch: {"loss": float(loss_of(model, batch))})
samples = data()
for _ in range(2):
    for step in run.steps(samples, epochs=2):
        step.run(loss_of)
run.finish(model)
