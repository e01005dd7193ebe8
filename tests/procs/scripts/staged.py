"""Trains models in stages, one after the other; prints the digest of each, what it predicts, and what is refused."""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import unisono
import unisono_lab
from unisono.errors import UnisonoError

CLASSES, WORDS = 10, 67

RUNS: list[unisono.Run] = []


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, dropout=0.2, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        out: Tensor = x + self.dense(x)
        return out


class Language(nn.Module):
    """A small GPT: code between the stages uses the words, adds, drops out and hands on a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 12), nn.Embedding(9, 12)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Block(12) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, WORDS, bias=False)
        self.register_buffer("mask", torch.full((9, 9), float("-inf")).triu(1), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        mask = self.mask[:length, :length]
        x = self.drop(self.words(words) + self.places(torch.arange(length)))
        for layer in self.layers:
            x = layer(x, mask)
        out: Tensor = self.head(self.norm(x))
        return out


class Residual(nn.Module):
    """A convolution with statistics over its batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


def residual() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
    layers = (nn.Sequential(nn.ReLU(inplace=True), Residual(8)) for _ in range(3))
    model = nn.Sequential(stem, *layers, nn.Flatten(), nn.Linear(128, CLASSES))
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return model


class Unused(nn.Module):
    """Some samples use a layer, others do not; nobody uses the last one, or trains the frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes = nn.Linear(48, 12), nn.Linear(12, 12)
        self.second, self.frozen = nn.Linear(12, 12), nn.Linear(12, 12).requires_grad_(False)
        self.third, self.never = Choosy(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.flatten(1))
        y = self.second(self.sometimes(y) if x.mean() > 0 else y).relu()
        out: Tensor = self.third(self.frozen(y), y, x.mean() > 0)
        return out


class Choosy(nn.Module):
    """Uses one of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, CLASSES)

    def forward(self, left: Tensor, right: Tensor, is_left: Tensor) -> Tensor:
        out: Tensor = self.layer(left if is_left else right)
        return out


class Drawn(nn.Module):
    """Leaves itself out at random, and scales by numbers of NumPy's and Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.3:
            return x
        out: Tensor = x + self.layer(x).relu() * float(np.random.normal()) * random.gauss(0, 1)
        return out


def drawn() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(48, 12)), Drawn(), Drawn(), Drawn(), nn.Linear(12, 10))


class Paired(nn.Module):
    """Returns a value and a penalty, of which the next layer takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(12, 12), nn.Dropout(0.2)

    def forward(self, x: Tensor, penalty: Tensor, *, scale: float, kept: dict[str, Any]) -> tuple[Tensor, Tensor]:
        y = self.drop(self.layer(x)).relu() * scale + kept["first"][0]
        return x + y, penalty + y.square().mean()


class Paying(nn.Module):
    """Adds the penalty to what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, CLASSES)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.layer(pair[0]) + pair[1]
        return out


class Checkpointed(nn.Module):
    """Layers that are computed again in backward passes, and return several values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(48, 12), nn.ModuleList(Paired() for _ in range(3)), Paying()

    def forward(self, x: Tensor) -> Tensor:
        y, penalty = self.first(x.flatten(1)), torch.zeros(())
        kept = {"first": [y, None]}
        for number, layer in enumerate(self.layers):
            y, penalty = checkpoint(layer, y, penalty, scale=0.5 + number, kept=kept, use_reentrant=False)
        out: Tensor = self.last((y, penalty))
        return out


def matrices(groups: list[dict[str, Any]]) -> Optimizer:
    """Updates whole matrices, and no other parameters."""
    return torch.optim.Muon(groups[0]["params"], lr=0.1)


def texts() -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (53, 8), generator=drawn)
    return TensorDataset(words[:, :-1], words[:, 1:])


def images() -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(53, 3, 4, 4, generator=drawn), torch.randint(0, CLASSES, (53,), generator=drawn))


def error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    outputs, wanted = model(batch[0]), batch[1]
    return F.cross_entropy(outputs.flatten(0, -2), wanted.flatten())


def augmented(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Draws before and behind the model."""
    inputs = batch[0] + 0.1 * torch.randn(batch[0].shape)
    outputs = F.dropout(model(inputs.to(memory_format=torch.channels_last)), 0.1)
    loss = F.cross_entropy(outputs, batch[1])
    RUNS[-1].log("logged", loss.detach())
    return loss


def weighted(model: nn.Module, batch: list[Tensor]) -> unisono.Weighted:
    chosen = batch[1] > CLASSES / 2  # in some shards there are none
    errors = F.cross_entropy(model(batch[0]), batch[1], reduction="none") * chosen
    return unisono.Weighted(errors.sum() / chosen.sum().clamp(min=1), chosen.sum())


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train, and how."""

    make: Callable[[], nn.Module]
    data: Callable[[], TensorDataset]
    cuts: list[str]
    optimizer: Callable[..., Optimizer]
    job: dict[str, Any]
    schedule: str = "1f1b"
    loss_fn: Callable[..., Any] = error
    clip_norm: float | None = None


LAYERS = ["layers.1", "layers.2", "layers.3", "norm"]

SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "bfs": "looped-bfs",
    "looped": "interleaved-1f1b",
    "zero": "interleaved-zero-bubble",
}

CASES = {
    **{
        name: Case(Language, texts, LAYERS, AdamW, {"shards": 6, "batch_size": 18}, schedule, clip_norm=0.5)
        for name, schedule in SCHEDULES.items()
    },
    "eight": Case(Language, texts, LAYERS, partial(SGD, lr=0.5), {"shards": 8, "batch_size": 16}, "looped-bfs"),
    "residual": Case(
        residual,
        images,
        ["1", "2.1", "3"],
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
        {"shards": 6, "batch_size": 24},
        "interleaved-zero-bubble",
        augmented,
    ),
    "unused": Case(
        Unused, images, ["second", "third"], partial(AdamW, lr=0.01), {"shards": 12, "batch_size": 24}, "1f1b", weighted
    ),
    "drawn": Case(drawn, images, ["1", "2", "3"], matrices, {"shards": 6, "batch_size": 18}, "interleaved-1f1b"),
    "again": Case(
        Checkpointed,
        images,
        ["layers.1", "layers.2", "last"],
        AdamW,
        {"shards": 6, "batch_size": 18},
        "interleaved-zero-bubble",
    ),
    "narrow": Case(
        Language,
        texts,
        LAYERS,
        torch.optim.Adagrad,
        {"shards": 6, "batch_size": 18, "arithmetic": {"precision": "bf16", "compression": "bf16"}},
    ),
}


def train(name: str) -> None:
    case = CASES[name]
    with unisono.init(seed=7, **case.job) as run:
        RUNS.append(run)
        model = run.pipeline(case.make(), case.cuts, schedule=case.schedule)
        data = case.data()
        decayed = [each for each in model.parameters() if each.ndim > 1 and each.requires_grad]
        others = [each for each in model.parameters() if each.ndim < 2 and each.requires_grad]
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        model, optimizer = run.prepare(model, case.optimizer(groups))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        run.register("schedule", schedule)
        losses = []
        for step in run.steps(data, epochs=2):
            losses.append(step.run(case.loss_fn, clip_norm=case.clip_norm))
            if step.is_last_in_epoch:
                run.predict(data)
            schedule.step()
        found = run.evaluate(data, lambda model, batch: {"error": error(model, batch), "other": 1.0})
        predicted = run.predict(data).double().sum().item()
        run.print(name, unisono.digest(model)[:16], losses[-1].hex(), found["error"].hex(), predicted.hex())
        run.finish()


class Tied(nn.Module):
    """A head whose weight is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight


class Odd(nn.Module):
    """A forward pass that is no chain."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        match self.how:
            case "skips":
                aside = 2 * y
                y = self.third(self.second(y) + aside)
            case "looks":
                y = y if y.shape[0] > 1 else -y
            case "returns":
                y = self.third(self.first(self.second(y)))
            case "breaks" if not self.second.weight.is_meta:
                self.second = None  # type: ignore[assignment]
            case "draws":
                y = y + torch.randn(x.shape)
        if self.how not in ("skips", "returns", "stops"):
            y = self.third(self.second(y))
        return y


def mean(model: nn.Module, batch: list[Tensor]) -> Tensor:
    out: Tensor = model(batch[0]).mean()
    return out


def twice(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return mean(model, batch) + mean(model, batch)


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))


def refused(run: unisono.Run) -> Iterable[Callable[[], Any]]:
    """What is refused wherever it runs."""
    yield lambda: run.pipeline(chain(), ["layer.2"])
    yield lambda: run.pipeline(chain(), ["3", "2"])
    yield lambda: run.pipeline(chain(), [])
    yield lambda: run.pipeline(chain(), ["2"], schedule="2f2b")
    yield lambda: run.pipeline(Tied(), ["head"])
    yield lambda: run.pipeline(chain(), ["1", "2"])
    compiled: Any = chain()
    compiled[2].compile(backend="eager")
    yield lambda: run.pipeline(compiled, ["2"])


def refused_on_devices(run: unisono.Run) -> Iterable[Callable[[], Any]]:
    """What two devices refuse besides, before anything travels."""
    yield lambda: run.pipeline(nn.Sequential(run.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)), ["1"])
    staged = run.pipeline(chain(), ["2"])
    yield lambda: run.pipeline(staged, ["2"])
    yield lambda: run.fully_shard(nn.Linear(4, 4))
    yield lambda: staged(torch.zeros(1, 4))
    yield lambda: run.prepare([staged, chain()], SGD(staged.parameters()))
    yield lambda: run.prepare(staged, SGD([*staged.parameters(), torch.zeros(1, requires_grad=True)]))
    yield lambda: run.prepare(staged, SGD(staged.parameters()), state={"seen": torch.zeros(1)})
    yield lambda: run.prepare(staged, unisono_lab.KFAC(staged))


def refuse(attempts: Callable[[unisono.Run], Iterable[Callable[[], Any]]]) -> None:
    with unisono.init(batch_size=8) as run:
        for attempt in attempts(run):
            try:
                attempt()
            except UnisonoError as error:
                run.print(f"{type(error).__name__}: {error}")


def fail(how: str) -> None:
    """Train what ends with an error."""
    with unisono.init(batch_size=8, shards=1 if how == "few" else 4) as run:
        model = run.pipeline(Odd(how), ["second", "third"][: 1 if how == "cuts" else 2])
        model, _ = run.prepare(model, SGD(model.parameters()))
        for step in run.steps(TensorDataset(torch.ones(64, 4))):
            if how == "killed" and step.number == 2 and model.first.weight.is_meta:
                os.kill(os.getpid(), signal.SIGKILL)
            step.run(twice if how == "twice" else mean)


match sys.argv[1:]:
    case ["refused"]:
        refuse(refused)
    case ["refused-on-devices"]:
        refuse(refused_on_devices)
    case ["fails", chosen]:
        fail(chosen)
    case names:
        for chosen in names or CASES:
            train(chosen)
