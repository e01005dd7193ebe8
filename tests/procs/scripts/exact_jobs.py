"""Trains a number of small jobs, one after the other, and prints a line for each: its name and what came out.

Every line must be the same for every number of workers.
"""

import hashlib
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import unisono
from unisono.adapt.norms import Monitoring
from unisono.adapt.view import Policy, View

JOBS: dict[str, Callable[[], Any]] = {}
WATCHED = ("gradient_norm", "gradient_variance", "loss_variance", "noise_scale", "ada_scale_gain")


def job(function: Callable[[], Any]) -> Callable[[], Any]:
    JOBS[function.__name__] = function
    return function


class Net(nn.Module):
    """Batch norm, layer norm, dropout, tied weights, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.inner = nn.Linear(6 * 36, 24)
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.layer_norm = nn.LayerNorm(24)
        self.unused = nn.Linear(4, 4)
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(F.relu(self.norm(self.conv(x)))).flatten(1)
        hidden = self.layer_norm(F.relu(self.inner(hidden)))
        found: Tensor = self.out(F.relu(self.second(F.relu(self.first(hidden)))))
        return found


def images(count: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(0, 10, (count,), generator=generator))


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


ARRIVING = {"bucket_mb": 0.001}
"""Gradients are taken as they arrive: in a single bucket that is small they are taken together."""


def train(
    model: Callable[[], nn.Module] = Net,
    data: Any = None,
    loss_fn: Callable[[Any, Any], Any] = cross_entropy,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    stepping: dict[str, Any] | None = None,
    looping: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a few epochs; returns the digest, the losses to the last bit, and an evaluation."""
    run = unisono.init(**{"batch_size": 64, "shards": 8, "seed": 3, **settings})
    built = model()
    built, _ = run.prepare(built, make_optimizer(built))
    data = data or images(100)
    steps = run.steps(data, epochs=2, **(looping or {}))
    losses = [step.run(loss_fn, **(stepping or {})).hex() for step in steps]
    found = run.evaluate(data, {"loss": loss_fn})
    outputs = run.predict(data)
    result = {"losses": losses, "loss": found["loss"].hex(), "outputs": bits(outputs)}
    return {"digest": run.finish(), **result}


def bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().numpy().tobytes()).hexdigest()[:16]


@job
def batch_norm_dropout_tied_unused() -> Any:
    return train(data=images(150))


@job
def a_batch_that_shards_do_not_divide() -> Any:
    return train(batch_size=61)


@job
def a_last_batch_smaller_than_the_number_of_shards() -> Any:
    return train(data=images(64 + 3))


@job
def a_dropped_last_batch() -> Any:
    return train(looping={"drop_last": True, "shuffle": False})


@job
def thirteen_shards() -> Any:
    return train(shards=13)


@job
def momentum_and_groups_with_a_frozen_parameter() -> Any:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Net)
        model.conv.weight.requires_grad_(False)
        groups: list[dict[str, Any]] = [
            {"params": model.inner.parameters(), "lr": 0.1},
            {"params": [*model.out.parameters(), model.conv.weight]},
        ]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3)

    return train(make_optimizer=optimizer)


@job
def adamw_clipped_by_norm() -> Any:
    return train(
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, fused=True),
        stepping={"clip_norm": 0.1},
    )


@job
def sgd_clipped_by_value() -> Any:
    return train(
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, fused=True),
        stepping={"clip_value": 0.001},
    )


@job
def float64() -> Any:
    return train(model=lambda: Net().double(), data=images(100, torch.float64), loss_fn=cross_entropy)


@job
def bf16_parameters() -> Any:
    return train(model=lambda: Net().to(torch.bfloat16), data=images(100, torch.bfloat16))


@job
def bf16_autocast() -> Any:
    return train(arithmetic={"precision": "bf16"})


@job
def small_buckets() -> Any:
    return train(data=images(150), arithmetic=ARRIVING)


@job
def a_parameter_that_only_some_shards_use() -> Any:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rarely = nn.Linear(64, 10), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(1)
            found: Tensor = self.always(flat)
            return found + self.rarely(flat) if flat[0, 0] > 0.7 else found

    return train(model=Sometimes)


@job
def counters_and_running_means_of_the_users_own() -> Any:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 10)
            self.mean: Tensor
            self.calls: Tensor
            self.hidden: Tensor
            self.register_buffer("mean", torch.zeros(64))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mask", torch.full((10, 10), float("-inf")).triu(1))
            self.register_buffer("hidden", torch.ones(3), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(1)
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * flat.detach().mean(0)  # assigned, not written in place
                self.calls += 1
                self.hidden.mul_(0.5).add_(flat.detach().mean())
            found: Tensor = self.linear(flat - self.mean) * self.hidden.mean()
            return found

    return train(model=Counting)


@job
def token_weighted_loss_with_a_shard_without_tokens() -> Any:
    def loss_fn(model: Any, batch: Any) -> Any:
        inputs, labels = batch
        real = labels > 6 if labels.sum() % 3 else labels > 100
        loss = F.cross_entropy(model(inputs), labels, reduction="none")
        return unisono.Weighted((loss * real).sum() / real.sum().clamp(min=1), real.sum())

    return train(data=images(150), loss_fn=loss_fn)  # with fewer, there are steps in which none has any


@job
def random_augmentation_in_loader_processes() -> Any:
    return train(data=Augmented(100), looping={"loader_workers": 2})


@job
def random_augmentation_in_this_process() -> Any:
    return train(data=Augmented(100))


class Augmented(Dataset[Any]):
    """Draws from all generators for each sample."""

    def __init__(self, count: int) -> None:
        self._images = images(count)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        image, label = self._images[index]
        noise = torch.randn(1, 8, 8) * random.random() + float(np.random.rand())
        return image + noise, label


@job
def a_gan_with_two_updates_on_one_batch() -> Any:
    run = unisono.init(batch_size=64, shards=8, seed=1)
    generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))
    judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizers = [torch.optim.Adam(generator.parameters(), 1e-3), torch.optim.Adam(judge.parameters(), 1e-3)]
    run.prepare([generator, judge], optimizers)

    def judge_loss(models: Any, batch: Any) -> Tensor:
        real = batch[0].flatten(1)
        fake = models[0](torch.randn(len(real), 8)).detach()
        return F.softplus(-models[1](real)).mean() + F.softplus(models[1](fake)).mean()

    def generator_loss(models: Any, batch: Any) -> Tensor:
        return F.softplus(-models[1](models[0](torch.randn(len(batch[0]), 8)))).mean()

    losses = []
    for step in run.steps(images(100), epochs=2):
        losses.append(step.run(judge_loss, optimizer=optimizers[1]).hex())
        losses.append(step.run(generator_loss, optimizer=optimizers[0]).hex())
    return {"losses": losses, "digest": run.finish()}


@job
def metrics_and_a_scheduler() -> Any:
    run = unisono.init(batch_size=61, shards=8, seed=1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = run.register("scheduler", torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8))
    run.prepare(model, optimizer)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        found = model(batch[0])
        run.log("accuracy", (found.argmax(1) == batch[1]).float().mean())
        run.log("norm", found.norm())
        return F.cross_entropy(found, batch[1])

    seen = []
    for step in run.steps(images(100), epochs=2):
        step.run(loss_fn)
        scheduler.step()
        seen.append({name: value.hex() for name, value in step.metrics.items()})
    return {"metrics": seen, "digest": run.finish()}


@job
def gradients_that_are_watched() -> Any:
    run = unisono.init(batch_size=50, shards=8, seed=3, records={"monitor": Monitoring(every=2, one_in=2)})
    model = Net()
    run.prepare(model, adam(model))
    figures = []
    for step in run.steps(images(100), epochs=3):
        step.run(cross_entropy)
        figures.append([run.metrics.get(name, 0.0) for name in WATCHED])
    figures.append([run.metrics.get(name, 0.0) for name in WATCHED])
    return {"digest": run.finish(), "figures": [[float(value).hex() for value in line] for line in figures]}


@job
def draws_between_the_steps() -> Any:
    run = unisono.init(batch_size=64, shards=8, seed=1)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    drawn = []
    for step in run.steps(images(100), epochs=1):
        drawn += [torch.rand(1).item(), float(np.random.rand()), random.random()]
        step.run(lambda model, batch: F.cross_entropy(model(batch[0].flatten(1)), batch[1]))
        drawn += [torch.rand(1).item(), float(np.random.rand()), random.random()]
    return {"drawn": drawn, "digest": run.finish()}


@job
def reduced_beside_the_backward_pass() -> Any:
    return train(communication={"overlap": True}, arithmetic=ARRIVING)


@job
def reduced_after_the_backward_pass() -> Any:
    return train(communication={"overlap": False})


@job
def a_layer_used_under_several_reentrant_checkpoints() -> Any:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.out = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x.flatten(1))
            for _ in range(3):
                hidden = checkpoint(lambda inputs: F.gelu(self.again(inputs)), hidden, use_reentrant=True)
            found: Tensor = self.out(hidden)
            return found

    return train(model=Repeated, arithmetic=ARRIVING)


@job
def a_backward_pass_of_the_loss_functions_own() -> Any:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            (1e-2 * model(batch[0]).pow(2).mean()).backward()
        return cross_entropy(model, batch)

    return train(loss_fn=loss_fn, arithmetic=ARRIVING)


@job
def gradients_of_the_loss_functions_own() -> Any:
    def loss_fn(model: Any, batch: Any) -> Any:
        if not torch.is_grad_enabled():
            return cross_entropy(model, batch)
        loss = cross_entropy(model, batch)
        loss.backward()
        return unisono.BackwardDone(loss)

    return train(loss_fn=loss_fn, data=images(150), batch_size=61)


class Seen:
    """What a metric outside of the model keeps."""

    def __init__(self) -> None:
        self.samples, self.total = torch.tensor(0), torch.zeros(3, dtype=torch.float64)
        self.largest, self.losses = torch.full((10,), -torch.inf), torch.empty(0, 2)

    def update(self, outputs: Tensor, loss: Tensor) -> None:
        self.samples += len(outputs)
        self.total = self.total + outputs[:, :3].double().sum(0)
        self.largest = torch.maximum(self.largest, outputs.amax(0))
        self.losses = torch.cat([self.losses, torch.stack([loss, loss.square()])[None]])


@job
def state_outside_of_the_model() -> Any:
    run = unisono.init(batch_size=61, shards=8, seed=1)
    model, seen = Net(), Seen()
    center, shifts = torch.zeros(10), torch.zeros(2, dtype=torch.int32)
    state = {
        "center": center,
        "shifts": (shifts, "sum"),
        "seen": (seen, {"samples": "sum", "total": "sum", "largest": "max", "losses": "cat"}),
    }
    run.prepare(model, adam(model), state=state)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0]) - center
        loss = F.cross_entropy(outputs, batch[1])
        seen.update(outputs.detach(), loss.detach())
        center.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        shifts.add_(torch.tensor([1, int(batch[1][0])]))
        return loss

    for step in run.steps(images(150), epochs=2):
        step.run(loss_fn)
    found = {name: bits(tensor) for name, tensor in vars(seen).items()} | {"center": bits(center)}
    sizes = [int(seen.samples), *seen.losses.shape, *shifts.tolist()]
    assert sizes[:4] == [300, 6 * 8, 2, 6 * 8], sizes
    return {"digest": run.finish(), "sizes": sizes, **found}


class Decaying(torch.optim.SGD):
    """Changes gradients in place, as many optimizers outside of torch do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.data.add_(parameter.data, alpha=0.1)
        return super().step(closure)


@job
def an_optimizer_that_changes_gradients() -> Any:
    return train(make_optimizer=lambda model: Decaying(model.parameters(), lr=0.05, momentum=0.9))


@job
def gradients_that_the_script_changes_after_the_step() -> Any:
    run = unisono.init(batch_size=64, shards=8, seed=1)
    model = Net()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    norms = []
    for step in run.steps(images(100), epochs=2):
        step.run(cross_entropy)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(bits(torch.stack([gradient.norm() for gradient in gradients])))
        for gradient in gradients:
            gradient.data.fill_(float("nan"))
    return {"norms": norms, "digest": run.finish()}


@job
def an_update_of_the_scripts_own() -> Any:
    run = unisono.init(batch_size=61, shards=8, seed=1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run.prepare(model, optimizer)
    scheduler = run.register("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    average = run.register("average", AveragedModel(model, avg_fn=get_ema_avg_fn(0.9)))

    def update() -> str:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            model.out.bias.add_(0.01 * torch.randn(10))
        scheduler.step()
        average.update_parameters(model)
        return float(norm).hex()

    norms = []
    for step in run.steps(images(150), epochs=2):
        step.run(cross_entropy, update=update)
        norms.append(step.returned)
    return {"norms": norms, "average": unisono.digest(average), "digest": run.finish()}


@job
def gradients_compressed_to_bf16() -> Any:
    return train(arithmetic={"compression": "bf16"}, batch_size=61)


def fused_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, fused=True)


@job
def fused_momentum_on_two_threads() -> Any:
    return train(make_optimizer=fused_momentum, arithmetic={"threads": 2})


class InTurn(Policy):
    """Takes another strategy after each step."""

    STRATEGIES = ("parameter-server:servers=1", "all-reduce", "parameter-server:servers=2", "parameter-server")

    def after_step(self, view: View) -> None:
        self.set_strategy(self.STRATEGIES[view.step % len(self.STRATEGIES)])


@job
def exact_strategies_in_turn() -> Any:
    return train(data=images(150), policies=[InTurn()])


@job
def another_seed() -> Any:
    return train(seed=4)


@job
def another_batch_size() -> Any:
    return train(batch_size=72)


@job
def other_shards() -> Any:
    return train(shards=16)


def main() -> None:
    """Train those that are named, or all."""
    for name in sys.argv[1:] or JOBS:
        line = json.dumps({"job": name, **JOBS[name]()})
        sys.stdout.write(f"RESULT {line}\n")  # in one piece: others may write to the same file
        sys.stdout.flush()


if __name__ == "__main__":
    main()
