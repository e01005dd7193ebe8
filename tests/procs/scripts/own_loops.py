"""Loops of a script's own, by name: what a body does, on a run, or as the same plain loop on one process."""

import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

SHAPE = os.environ["SHAPE"]
EPOCHS = 3
is_plain = "PLAIN" in os.environ

drawn = torch.Generator().manual_seed(0)
labels = torch.randint(0, 3, (102,), generator=drawn)
inputs = torch.randn(102, 12, generator=drawn) + labels[:, None] / 2
loader: Any = DataLoader(TensorDataset(inputs, labels), batch_size=32)


class Centred(nn.Module):
    """Subtracts a running mean, which is a buffer; shards of one sample will do."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(values.detach().mean(0), 0.1)
        return values - self.mean


def network(before: int, behind: int, dropout: float = 0.2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, 16), Centred(), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, behind))


shards = {"shards": 1} if "STILL" in os.environ else {}
run: Any = None if is_plain else unisono.init(seed=3, checkpoints={"every": 2}, **shards)  # type: ignore[arg-type]
torch.manual_seed(3)


def prepared(models: Any, optimizers: Any, *more: Any) -> list[Any]:
    """Models, optimizers, the loader, and what else there is."""
    if is_plain:
        return [models, optimizers, loader, *more]
    return list(run.prepare(models, optimizers, loader, *more))


def epochs() -> Iterator[int]:
    """The numbers of the epochs."""
    yield from range(EPOCHS) if is_plain else run.epochs(EPOCHS, loader)


def noise(rows: int) -> torch.Tensor:
    """What a body draws, or, to compare with the plain loop, does not."""
    return torch.full((rows, 4), 0.5) if "STILL" in os.environ else torch.randn(rows, 4)


STILL = 0.0 if "STILL" in os.environ else 0.2
models: list[nn.Module] = []

if SHAPE in ("one loss", "zeroed first", "accumulated"):
    model: Any = network(12, 3, STILL)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    model, optimizer, loader, scheduler = prepared(model, optimizer, scheduler)
    models = [model]
    for _ in epochs():
        numbered = enumerate(loader) if is_plain else run.enumerate(loader)
        for number, (x, y) in numbered:
            if SHAPE == "zeroed first":
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if SHAPE == "accumulated" and number % 3 != 2:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            if SHAPE != "zeroed first":
                optimizer.zero_grad(set_to_none=SHAPE == "one loss")
elif SHAPE == "two losses":  # two backward passes make one gradient
    model = network(12, 3, STILL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = prepared(model, optimizer)
    models = [model]
    for _ in epochs():
        for x, y in loader:
            model.zero_grad()
            outputs = model(x)
            F.cross_entropy(outputs, y).backward(retain_graph=True)
            (outputs.square().mean() / 10).backward()
            optimizer.step()
elif SHAPE == "gan":  # the discriminator from two losses, then the generator through it
    generator, critic = network(4, 12, STILL), network(12, 1, STILL)
    of_critic: Any = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.999))
    of_generator: Any = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    _, _, loader = prepared([generator, critic], [of_critic, of_generator])
    models = [generator, critic]
    for _ in epochs():
        for x, _y in loader:
            critic.zero_grad()
            real, false = torch.ones(len(x), 1), torch.zeros(len(x), 1)
            F.binary_cross_entropy_with_logits(critic(x), real).backward()
            made = generator(noise(len(x)))
            F.binary_cross_entropy_with_logits(critic(made.detach()), false).backward()
            of_critic.step()
            generator.zero_grad()
            F.binary_cross_entropy_with_logits(critic(made), real).backward()
            of_generator.step()
elif SHAPE == "clipped weights":  # WGAN: weights are clipped behind the update, and one of them is trained more often
    generator, critic = network(4, 12, STILL), network(12, 1, STILL)
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=0.01)
    of_generator = torch.optim.RMSprop(generator.parameters(), lr=0.01)
    _, _, loader = prepared([generator, critic], [of_critic, of_generator])
    models = [generator, critic]
    for _ in epochs():
        for number, (x, _y) in enumerate(loader) if is_plain else run.enumerate(loader):
            of_critic.zero_grad()
            (critic(generator(noise(len(x))).detach()).mean() - critic(x).mean()).backward()
            of_critic.step()
            if is_plain or run.sync_gradients:
                for parameter in critic.parameters():
                    parameter.data.clamp_(-0.1, 0.1)
            if number % 2:
                of_generator.zero_grad()
                (-critic(generator(noise(len(x)))).mean()).backward()
                of_generator.step()

total = math.fsum(float(value.double().sum()) for model in models for value in model.state_dict().values())
if is_plain:
    print(f"after {total:.6f}")
else:
    run.print(f"after {total:.6f}")
    run.finish(models)
