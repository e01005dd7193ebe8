"""What is trained: a model, its data and its loss, the same for every contender."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCHES = 4
"""Global batches in memory; training goes round them."""

LossFunction = Callable[[nn.Module, Any], Tensor]


class Residual(nn.Module):
    """Two convolutions beside a shortcut, as in ResNet-18."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        alike = stride == 1 and inside == outside
        self.shortcut = (
            nn.Identity()
            if alike
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, images: Tensor) -> Tensor:
        """(samples, inside, height, width) → (samples, outside, height/stride, width/stride)."""
        return F.relu(self.convolutions(images) + self.shortcut(images))


class Block(nn.Module):
    """Causal attention, then two layers for each place alone; both are added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.attention_norm, self.attention_in = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(samples, context, width) → the same shape."""
        query, key, value = (
            part.unflatten(2, (self.heads, 32)).transpose(1, 2)
            for part in self.attention_in(self.attention_norm(x)).chunk(3, dim=2)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).flatten(2))
        beside: Tensor = self.layers(x)
        return x + beside


class Gpt(nn.Module):
    """Reads bytes; without dropout, so that every contender computes the same."""

    def __init__(self, blocks: int, width: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, inputs: Tensor) -> Tensor:
        """Bytes (samples, context) → logits (samples, context, 256)."""
        seen: Tensor = self.blocks(self.bytes(inputs) + self.places.weight)
        logits: Tensor = self.head(seen)
        return logits


def resnet(width: int = 16) -> nn.Module:
    """The shape of ResNet-18 for images of 32 by 32, narrow."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inside = width
    for outside, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Residual(inside, outside, stride), Residual(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


def mlp(*widths: int) -> nn.Module:
    """Linear layers of these widths, with ReLU in between."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def images(samples: int, side: int = 32) -> TensorDataset:
    """Random images of 3 colours, with labels."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 3, side, side, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (samples,), generator=generator))


def rows(samples: int) -> TensorDataset:
    """Random rows of 26 numbers, with labels."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 26, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (samples,), generator=generator))


def texts(samples: int, context: int = 128) -> TensorDataset:
    """Random bytes, each of which is to be predicted from those before."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 256, (samples, context + 1), generator=generator)
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean over the samples."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def text_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean over all bytes."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with its data.

    Attributes:
        build: makes the model; seeded by whoever calls it.
        batch_size: samples of a global batch.
        data: makes so many samples.
        loss: of a model and a batch.
        batch_norm: a sample's loss depends on which samples it is computed with, so losses of different splits of
            the batch differ by more than rounding.
    """

    build: Callable[[], nn.Module]
    batch_size: int
    data: Callable[[int], TensorDataset]
    loss: LossFunction
    batch_norm: bool = False


WORKLOADS = {
    # 25.2 M parameters in wide layers: much to reduce and to update, little to compute.
    "mlp": Workload(lambda: mlp(3072, 2900, 2900, 2700, 10), 32, images, image_loss),
    "resnet": Workload(resnet, 128, images, image_loss, batch_norm=True),
    "gpt": Workload(lambda: Gpt(blocks=4, width=128, context=128), 16, texts, text_loss),
    # Layers of one size, whose gradients arrive evenly through the backward pass: for the slow network.
    "tower": Workload(lambda: mlp(3072, *[1024] * 8, 10), 256, images, image_loss),
    # 2.5 M parameters: 10 MB, for what happens to a job of common size when workers come and go.
    "narrow": Workload(lambda: mlp(3072, 800, 10), 32, images, image_loss),
    # 676 parameters, so that whatever takes time is not the computation.
    "nothing": Workload(lambda: mlp(26, 18, 10), 64, rows, image_loss),
    # For trying things out.
    "tiny": Workload(lambda: mlp(3072, 32, 10), 16, images, image_loss),
}
