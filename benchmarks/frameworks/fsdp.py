"""A language model in slices on two devices: torch's FSDP2 by itself, and with Unisono; and whole, in a plain loop."""

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.frameworks import PLAIN, Note

STOCK = "fsdp2"
WORDS, LENGTH, WIDTH, DEPTH = 512, 32, 256, 4


class Language(nn.Module):
    """A transformer of layers that look at all words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Any:
        """A guess at each word, shape (batch, length, words)."""
        found = self.embedding(words)
        for layer in self.layers:
            found = layer(found)
        return self.head(found)


def loss_of(model: Any, words: Tensor) -> Tensor:
    """How badly words are guessed."""
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def train(way: str, batch_size: int, workers: int, note: Note) -> None:
    """Train until the process is stopped; the workers are the devices of one."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    if way == PLAIN:
        train_whole(batch_size, note)
    (_stock if way == STOCK else _with_unisono)(batch_size, workers, note)


def train_whole(batch_size: int, note: Note) -> NoReturn:
    """Train the whole model by torch alone, until the process is stopped."""
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    while True:
        loss_of(model, torch.randint(0, WORDS, (batch_size, LENGTH))).backward()
        optimizer.step()
        optimizer.zero_grad()
        note()


def _cut(model: Language, cut: Callable[..., Any]) -> Language:
    for layer in model.layers:
        cut(layer)
    cut(model, reshard_after_forward=False)
    return model


def _stock(batch_size: int, workers: int, note: Note) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = _cut(Language(), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    while True:
        words = torch.randint(0, WORDS, (batch_size // workers, LENGTH))
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()
        note()


def _with_unisono(batch_size: int, workers: int, note: Note) -> None:
    run = unisono.init(batch_size=batch_size, shards=workers, communication={"devices_per_worker": workers})
    model = _cut(Language(), run.fully_shard)
    model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), foreach=True))
    words = TensorDataset(torch.randint(0, WORDS, (64 * batch_size, LENGTH)))
    for step in run.steps(words, epochs=10**6):
        step.run(lambda model, batch: loss_of(model, batch[0]))
        note()
