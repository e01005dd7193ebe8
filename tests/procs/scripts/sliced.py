"""Trains models in slices, one after the other; prints the digest of each, what it predicts, and what is refused."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from torch.utils.data import TensorDataset

import unisono
import unisono_lab
from unisono.errors import UnisonoError

SAMPLES, CLASSES = 50, 10


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, dropout=0.2, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.dense(x)
        return out


class Language(nn.Module):
    """Its embedding is the weight of its head as well; 67 words are cut evenly by no number of devices."""

    def __init__(self, run: unisono.Run) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(67, 12), nn.Linear(12, 67, bias=False)
        self.blocks = nn.ModuleList(run.fully_shard(Block(12)) for _ in range(2))
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Residual(nn.Module):
    """A convolution with statistics over its batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


class Unused(nn.Module):
    """Some samples use a layer, others do not; nobody uses the last ones, or trains the frozen one."""

    def __init__(self, run: unisono.Run) -> None:
        super().__init__()
        self.first, self.never = run.fully_shard(nn.Linear(48, 10)), run.fully_shard(nn.Linear(48, 10))
        self.sometimes, self.frozen = nn.Linear(10, 10), nn.Linear(10, 10).requires_grad_(False)
        self.alone = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x.flatten(1))
        frozen: Tensor = self.frozen(self.sometimes(out) if x.mean() > 0 else out)
        return frozen


class Meta(nn.Module):
    """Built where nothing has memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Tanh(), nn.Linear(5, 1), nn.Linear(1, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Pairs(nn.Module):
    """Two layers with one weight, which are gathered together, and a frozen number that is in no slices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up, self.last = (nn.Linear(*each) for each in ((48, 6), (6, 6), (6, 6), (6, 10)))
        self.up.weight = self.down.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.up(torch.relu(self.down(self.first(x.flatten(1))))))
        return out


def images(run: unisono.Run) -> TensorDataset:
    drawn = torch.Generator().manual_seed(run.job.seed)
    return TensorDataset(
        torch.randn(SAMPLES, 3, 4, 4, generator=drawn), torch.randint(0, CLASSES, (SAMPLES,), generator=drawn)
    )


def texts(run: unisono.Run) -> TensorDataset:
    drawn = torch.Generator().manual_seed(run.job.seed)
    words = torch.randint(0, 67, (SAMPLES, 7), generator=drawn)
    return TensorDataset(words[:, :-1], words[:, 1:])


def error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    outputs, wanted = model(batch[0]), batch[1]
    return F.cross_entropy(outputs.flatten(0, -2), wanted.flatten())


def weighted(model: nn.Module, batch: list[Tensor]) -> unisono.Weighted:
    chosen = batch[1] > CLASSES / 2  # in some shards of the smallest batch there are none
    errors = F.cross_entropy(model(batch[0]), batch[1], reduction="none") * chosen
    return unisono.Weighted(errors.sum() / chosen.sum().clamp(min=1), chosen.sum())


def language(run: unisono.Run) -> nn.Module:
    return run.fully_shard(Language(run))


def residual(run: unisono.Run) -> nn.Module:
    layers = [run.fully_shard(Residual(3)) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, CLASSES))
    return run.fully_shard(model, reshard_after_forward=False)  # so its own parameters stay gathered behind predictions


def unused(run: unisono.Run) -> nn.Module:
    return run.fully_shard(Unused(run))


def on_meta(run: unisono.Run) -> nn.Module:
    with torch.device("meta"):
        model = Meta()
    for layer in model.layers:
        run.fully_shard(layer)
    return run.fully_shard(model)


def pairs(run: unisono.Run) -> nn.Module:
    with torch.device("meta"):
        model = Pairs()
    model.register_module("first", checkpoint_wrapper(model.first))
    run.fully_shard([model.down, model.up])
    return run.fully_shard(model, ignored_params={model.last.bias})


def by_shape(parameters: Iterable[nn.Parameter]) -> Optimizer:
    listed = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [one for one in listed if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in listed if one.ndim < 2]},
    ]
    return Adam(groups, lr=0.02, amsgrad=True)


def whole_matrices(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Muon of what it takes; of the rest one that keeps a list, a number in its group, and what AdamW keeps."""
    listed = list(parameters)
    muon = Muon([one for one in listed if one.ndim == 2], lr=0.02)
    return [muon, Factors([one for one in listed if one.ndim != 2], lr=0.02)]


@unisono.whole_matrix
class Factors(AdamW):
    """Its gradients are divided by the norms of rows so far, which it keeps for all rows on each device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norms = self.state[parameter].setdefault("rows", [torch.ones(len(parameter))])[0]
                    norms += parameter.grad.flatten(1).norm(dim=1) if parameter.ndim > 1 else parameter.grad.norm()
                    parameter.grad /= norms.view(-1, *[1] * (parameter.ndim - 1)) * group["steps"]
        kept = {each: state.pop("rows", None) for each, state in self.state.items()}
        super().step()
        for each, rows in kept.items():
            self.state[each]["rows"] = rows


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train, and how."""

    make: Callable[[unisono.Run], nn.Module]
    optimizer: Callable[..., Optimizer | list[Optimizer]]
    job: dict[str, Any]
    loss_fn: Callable[..., Any] = error
    clip_norm: float | None = None


CASES = {
    "language": Case(language, AdamW, {"shards": 8, "batch_size": 16}),
    "clipped": Case(language, partial(SGD, lr=0.5, momentum=0.9), {"shards": 6, "batch_size": 12}, clip_norm=0.3),
    "residual": Case(residual, partial(SGD, lr=0.1, nesterov=True, momentum=0.9), {"shards": 6, "batch_size": 24}),
    "unused": Case(unused, partial(AdamW, lr=0.01), {"shards": 5, "batch_size": 15}),
    "meta": Case(on_meta, by_shape, {"shards": 7, "batch_size": 14}, weighted),
    "matrices": Case(language, whole_matrices, {"shards": 6, "batch_size": 18}, clip_norm=1.0),
    "pairs": Case(pairs, AdamW, {"shards": 5, "batch_size": 15}),
    "images": Case(residual, Factors, {"shards": 6, "batch_size": 24}),
    "narrow": Case(
        residual, AdamW, {"shards": 6, "batch_size": 18, "arithmetic": {"precision": "bf16", "compression": "bf16"}}
    ),
}


def train(name: str) -> None:
    case = CASES[name]
    with unisono.init(seed=7, **case.job) as run:
        data = texts(run) if case.make is language else images(run)
        model = case.make(run)
        made = case.optimizer(each for each in model.parameters() if each.requires_grad)
        optimizers = made if isinstance(made, list) else [made]
        run.prepare(model, optimizers)
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers]
        for number, schedule in enumerate(schedules):
            run.register(f"schedule {number}", schedule)
        losses = []
        for step in run.steps(data, epochs=2):
            losses.append(step.run(case.loss_fn, clip_norm=case.clip_norm))
            if step.is_last_in_epoch:
                run.predict(data)
            for schedule in schedules:
                schedule.step()
        predicted = run.predict(data).double().sum().item()
        run.print(name, unisono.digest(model)[:16], losses[-1].hex(), predicted.hex())
        run.finish()


def train_parts() -> None:
    """Two models, each with an optimizer and a call of its own."""
    with unisono.init(seed=7, batch_size=20, shards=5) as run:
        body, head = run.fully_shard(nn.Sequential(nn.Flatten(), nn.Linear(48, 5))), run.fully_shard(nn.Linear(5, 10))
        optimizers = [AdamW(body.parameters()), SGD(head.parameters(), lr=0.1, momentum=0.9)]
        run.prepare([body, head], optimizers)

        def both(models: Any, batch: list[Tensor]) -> Tensor:
            return F.cross_entropy(head(body(batch[0])), batch[1])

        for step in run.steps(images(run), epochs=2):
            loss = 0.0
            for optimizer in optimizers:
                loss = step.run(both, optimizer=optimizer, clip_norm=1.0)
        run.print("parts", unisono.digest(body)[:16], unisono.digest(head)[:16], loss.hex())
        run.finish()


def refused(run: unisono.Run) -> Iterable[Callable[[], Any]]:
    """What is refused where a model lies in slices."""
    layer = run.fully_shard(nn.Linear(4, 4))
    yield lambda: run.prepare(layer, AdamW(layer.parameters(), fused=True))
    yield lambda: run.prepare(layer, torch.optim.Adafactor([layer.weight]))
    yield lambda: run.fully_shard(nn.Sequential(nn.BatchNorm1d(3), nn.PReLU(), Scalar()))
    yield lambda: run.fully_shard(nn.Sequential(layer, tied_to(layer)))
    whole = nn.Linear(4, 4)
    yield lambda: run.prepare(whole, SGD(whole.parameters()))
    yield lambda: run.prepare([layer, whole], SGD([*layer.parameters(), *whole.parameters()]))
    with torch.device("meta"):
        hollow = Scalar()
    yield lambda: run.fully_shard(hollow)
    yield lambda: unisono_lab.KFAC(layer)
    yield partial(take_a_step, run, hooked_muon, lambda step: step.run(mean))
    yield partial(take_a_step, run, AdamW, lambda step: run.curvature(mean))
    for ways in (("first", "second"), ("first", "")):  # the devices' shards call other layers, or one of them none
        yield partial(choose, run, ways)


def tied_to(layer: nn.Linear) -> nn.Linear:
    other = nn.Linear(4, 4)
    other.weight = layer.weight
    return other


def mean(model: Any, batch: Any) -> Tensor:
    out: Tensor = model(batch[0]).mean()
    return out


def hooked_muon(parameters: Iterable[Tensor]) -> Optimizer:
    """Its matrices alone, and somebody who wants to see them updated."""
    optimizer = Muon([one for one in parameters if one.ndim == 2])
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def take_a_step(
    run: unisono.Run, make: Callable[[Iterable[Tensor]], Optimizer], body: Callable[[unisono.Step], Any]
) -> None:
    """The body of the first step with a layer in slices."""
    layer = run.fully_shard(nn.Linear(4, 4, bias=False))
    run.prepare(layer, make(layer.parameters()))
    for step in run.steps(TensorDataset(torch.ones(8, 4))):
        body(step)


class Choosing(nn.Module):
    """Two layers, of which each shard calls one, or none: whatever its samples say."""

    def __init__(self, run: unisono.Run, ways: tuple[str, str]) -> None:
        super().__init__()
        self.first, self.second = run.fully_shard(nn.Linear(4, 4)), run.fully_shard(nn.Linear(4, 4))
        self.last, self.ways = nn.Linear(4, 1), ways

    def forward(self, x: Tensor) -> Tensor:
        way = self.ways[int(x[0, 0])]
        out: Tensor = self.last(getattr(self, way)(x) if way else x)
        return out


def choose(run: unisono.Run, ways: tuple[str, str]) -> None:
    """Shards of which every other one takes another way through layers that are in slices for themselves."""
    layers = run.fully_shard(Choosing(run, ways))
    run.prepare(layers, SGD(layers.parameters()))
    samples = TensorDataset(torch.arange(8.0).remainder(2)[:, None].expand(8, 4))
    for step in run.steps(samples, shuffle=False):
        step.run(lambda model, batch: model(batch[0]).mean())


class Scalar(nn.Module):
    """A parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


def refuse() -> None:
    with unisono.init(batch_size=8, shards=8) as run:
        for attempt in refused(run):
            try:
                attempt()
            except UnisonoError as error:
                run.print(f"{type(error).__name__}: {error}")


for chosen in sys.argv[1:] or (*CASES, "parts"):
    if chosen == "refused":
        refuse()
    elif chosen == "parts":
        train_parts()
    else:
        train(chosen)
