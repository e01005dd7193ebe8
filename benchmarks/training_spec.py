"""Trainings whose accuracy counts: what a worker is told, and what it tells in the end."""

import math
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono

HELD_OUT = 600
"""Images that are not trained on."""

COPIES = 5
"""Of each of them, each with noise of its own, where images have noise."""

MOMENTUM = 0.9

PolicyName = Literal["none", "warm-up", "ada-scale", "noise-scale", "noise-scale, ada-scale"]


class TrainingSpec(BaseModel):
    """One way of training a small network on scikit-learn's digits.

    Attributes:
        batch_size: that it begins with.
        rate: of learning, with that batch; with AdaScale for its base batch.
        samples: after which it ends, unless AdaScale ends it before.
        falls: whether the rate falls along half a cosine until then.
        shards: of a batch.
        policy: that changes rate or batch.
        factor: by which the policy ``warm-up`` multiplies the rate, over a tenth of the samples.
        iterations: scale-invariant ones, after which AdaScale ends, and over which the rate falls.
        largest: batch of the policy ``noise-scale``.
        noise: standard deviation of what is added to the pixels, which are 0 … 1.
        looks: whether to look at the accuracy after each epoch, not only in the end.
    """

    model_config = ConfigDict(frozen=True)

    batch_size: int
    rate: float
    samples: int
    falls: bool = False
    shards: int = 8
    policy: PolicyName = "none"
    factor: float = 1.0
    iterations: int = 0
    largest: int = 0
    noise: float = 0.0
    looks: bool = False

    def policies(self) -> list[unisono.Policy]:
        """Made anew for each run."""
        if self.policy == "none":
            return []
        if self.policy == "warm-up":
            return [unisono.LinearScaling(self.factor, self.samples // 10)]
        if self.policy == "ada-scale":
            end = self.iterations
            return [unisono.AdaScale(schedule=lambda tau: half_cosine(tau / end), until=end)]
        if self.policy == "noise-scale":
            return [unisono.NoiseScalePolicy(self.largest, "sqrt", every=10, ramp=5, share=2)]
        growing = unisono.NoiseScalePolicy(self.largest, "none", every=10, share=2)
        return [growing, unisono.AdaScale(base=self.batch_size)]

    def rate_at(self, position: int) -> float:
        """What the script sets, where so many samples have been used."""
        return self.rate * (half_cosine(position / self.samples) if self.falls else 1.0)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Of one shard."""
        images, labels = batch
        if self.noise:
            images = images + self.noise * torch.randn_like(images)
        return F.cross_entropy(model(images), labels)


class TrainingSpecs(BaseModel):
    """What one crew trains, one after the other.

    Attributes:
        specs: in this order.
        seed: of all of them.
    """

    specs: list[TrainingSpec]
    seed: int


class Look(BaseModel):
    """How a run stands.

    Attributes:
        seconds: of training so far, without the looks.
        cpu_seconds: of the main worker's computing, in the same time.
        samples: used so far.
        steps: done so far.
        batch_size: the largest since the look before.
        accuracy: on held-out images.
    """

    seconds: float
    cpu_seconds: float
    samples: int
    steps: int
    batch_size: int
    accuracy: float


class Learned(BaseModel):
    """For each spec its looks, the last one in the end; none if its loss was no number any more."""

    runs: list[list[Look]]


def half_cosine(progress: float) -> float:
    """From 1 to nearly 0 as ``progress`` goes from 0 to 1."""
    return max(0.5 * (1 + math.cos(math.pi * min(1.0, progress))), 1e-6)


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images to train on, and held-out ones: the same for all seeds."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    trained, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return TensorDataset(images[trained], labels[trained]), TensorDataset(images[held_out], labels[held_out])


def held_out(noise: float) -> TensorDataset:
    """What accuracy is measured on: as noisy as what is trained on."""
    images, labels = digits()[1].tensors
    if noise:
        images, labels = images.repeat(COPIES, 1), labels.repeat(COPIES)
        images = images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    return TensorDataset(images, labels)


def network() -> nn.Module:
    """Three layers."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
