"""The models that are trained: small ones for their bits, ResNet-50 and a GPT of 124 M parameters for their time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.workloads import resnet


class Block(nn.Module):
    """Causal attention, then two layers for each place alone, with dropout in both."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.inward, self.outward = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(samples, context, width) → the same shape."""
        query, key, value = self.inward(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.outward(seen.transpose(1, 2).flatten(2))
        beside: Tensor = self.layers(x)
        return x + beside


class Gpt(nn.Module):
    """The shape of GPT-2; the last layer has the weights of the first."""

    def __init__(self, words: int, width: int, blocks: int, context: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, max(2, width // 64), dropout) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """(samples, context) → logits (samples, context, words)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.words(words) + self.places.weight)))
        return logits


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(*_normed(inside, width, 1), nn.ReLU(inplace=True)),
            *(*_normed(width, width, 3, stride), nn.ReLU(inplace=True)),
            *_normed(width, 4 * width, 1),
        )
        alike = stride == 1 and inside == 4 * width
        self.shortcut = nn.Sequential(*([] if alike else _normed(inside, 4 * width, 1, stride)))

    def forward(self, images: Tensor) -> Tensor:
        """(samples, inside, height, width) → (samples, 4 x width, height/stride, width/stride)."""
        return F.relu(self.convolutions(images) + self.shortcut(images))


def _normed(inside: int, outside: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inside, outside, size, stride, size // 2, bias=False), nn.BatchNorm2d(outside)]


def resnet50() -> nn.Module:
    """ResNet-50 for images of 224 by 224."""
    layers = [*_normed(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inside, width, 1 if number else stride))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


def mlp() -> nn.Module:
    """It has running statistics and dropout."""
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 10))


def small_resnet(width: int) -> nn.Module:
    """A ResNet for images of 32 by 32, with dropout before its last layer."""
    *layers, head = resnet(width).children()
    return channels_last(nn.Sequential(*layers, nn.Dropout(0.2), head))


def channels_last(model: nn.Module) -> nn.Module:
    """The same with kernels as convolutions on GPUs are fastest with."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over samples, or over all words."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def numbers(samples: int, *shape: int, classes: int = 10) -> TensorDataset:
    """Random inputs of a shape, with labels."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(0, classes, (samples,), generator=generator))


def texts(samples: int, words: int, context: int) -> TensorDataset:
    """Random words, each of which is to be predicted from those before."""
    text = torch.randint(0, words, (samples, context + 1), generator=torch.Generator().manual_seed(5))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


@dataclass(frozen=True, slots=True)
class Task:
    """A model, and so many samples for it."""

    model: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    batch_size: int


SMALL = {
    "mlp": Task(mlp, lambda count: numbers(count, 64), 64),
    "resnet": Task(lambda: small_resnet(8), lambda count: numbers(count, 3, 16, 16), 16),
    "gpt": Task(lambda: Gpt(64, 32, 2, 16, 0.1), lambda count: texts(count, 64, 16), 16),
}
"""For dry runs. With 4 channels that lie as channels_last, torch 2.13 corrupts the heap on CPUs with AVX2 alone."""

COMPARED = {
    "mlp": SMALL["mlp"],
    "resnet": Task(lambda: small_resnet(32), lambda count: numbers(count, 3, 32, 32), 64),
    "gpt": Task(lambda: Gpt(512, 256, 4, 128, 0.1), lambda count: texts(count, 512, 128), 64),
}
"""Those whose bits are compared."""

TIMED = {
    "resnet": Task(
        lambda: channels_last(resnet50()),
        lambda count: numbers(count, 3, 224, 224, classes=1000),
        64,
    ),
    "gpt": Task(lambda: Gpt(50_304, 768, 12, 512, 0.0), lambda count: texts(count, 50_304, 512), 16),
}
"""Those whose steps are timed."""
