"""Trains a transformer in tensor parallel, where a worker has several devices; or tries what is refused."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import UnisonoError

HELD = os.environ.get("HELD", "")
"""A file for the number of elements that a device updates; its number follows."""

WIDTH, HEADS, WORDS = 12, 6, 31
PLAN: dict[str, Any] = {
    **{f"layers.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")},
    **{f"layers.*.{name}": RowwiseParallel() for name in ("out", "down")},
}


class Layer(nn.Module):
    """Attention and a feed-forward part; each device has some heads, and some of the hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 42), nn.Linear(42, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        query, key, value = (
            part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(y))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.second(x)))))
        return out


class Language(nn.Module):
    """Its last layer is used by some samples alone; and it has statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.words(words).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers if words.sum() % 2 else self.layers[:-1]:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(run: unisono.Run) -> None:
    model = run.parallelize(Language(), PLAN)
    model, optimizer = run.prepare(model, AdamW(model.parameters(), lr=0.01))
    drawn = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (53, 8), generator=drawn)
    data = TensorDataset(words[:, :-1], words[:, 1:])
    for step in run.steps(data, epochs=2):
        loss = step.run(error, clip_norm=0.5)
    found = run.evaluate(data, lambda model, batch: {"error": error(model, batch)})
    held = sum(each.numel() for each in optimizer.param_groups[0]["params"])
    if HELD:
        Path(f"{HELD}-{run.inside.membership.workers.devices.rank}").write_text(str(held))
    run.print("trained", unisono.digest(model)[:16], loss.hex(), found["error"].hex())
    run.finish()


def refuse(run: unisono.Run) -> None:
    attempts: list[Callable[[], Any]] = [
        lambda: run.parallelize(nn.Linear(4, 4), {"up": ColwiseParallel()}),
        lambda: run.parallelize(run.fully_shard(nn.Linear(4, 4)), {"": ColwiseParallel()}),
        lambda: run.prepare(model := nn.Sequential(nn.Linear(4, 4)), late(model)),
        lambda: run.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ["1"]),
    ]

    def late(model: nn.Module) -> SGD:
        made = SGD(model.parameters())
        run.parallelize(model, {"0": ColwiseParallel()})
        return made

    for attempt in attempts:
        try:
            attempt()
        except UnisonoError as failure:
            run.print(f"{type(failure).__name__}: {failure}")


with unisono.init(batch_size=15, shards=6, seed=7) as started:
    (refuse if sys.argv[1:] == ["refused"] else train)(started)
