"""What Unisono adds to a step: one worker and one shard beside the plain PyTorch loop on the same batches.

    python benchmarks/step_time.py [--repeats 60] [--steps 5] [--json FILE]

Both loops run in this process with the same number of threads and the same allocator, in turns of a few steps, in
random order, so that a machine that gets slower or faster meanwhile does so for both. What counts is the ratio of the
two within one turn; shown are its median and a bootstrap interval, and the losses are compared, so that both did the
same work.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import unisono
from unisono.plan.order import sample_order

BATCH = 128

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    ),
    "convnet": lambda: nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 10),
    ),
}  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repeats", type=int, default=60, help="turns of each loop")
    arguments.add_argument("--steps", type=int, default=5, help="steps in a turn")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--json", type=Path, help="also write the figures here")
    chosen = arguments.parse_args()
    results = {name: measure(name, chosen.repeats, chosen.steps, chosen.threads) for name in MODELS}
    print(f"{'model':10} {'plain':>10} {'unisono':>10} {'ratio':>7}  95 % interval   losses")
    for name, found in results.items():
        low, high = found["interval"]
        print(
            f"{name:10} {found['plain_ms']:7.1f} ms {found['unisono_ms']:7.1f} ms {found['ratio']:7.3f}  "
            f"{low:.3f} … {high:.3f}   {'identical' if found['same_losses'] else 'DIFFERENT'}"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2))


def measure(name: str, repeats: int, steps: int, threads: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        run = unisono.init(batch_size=BATCH, shards=1, seed=0, threads=threads, run_dir=folder)
        data = images(BATCH * 8)
        epochs = 1 + (repeats + 1) * steps // 8
        ours, theirs = with_unisono(run, name, data, epochs), plain(name, data, epochs)
        turns = [(take(ours, steps), take(theirs, steps))]  # the first turn warms up
        for _ in range(repeats):
            if random.random() < 0.5:  # noqa: S311
                first = take(ours, steps)
                turns.append((first, take(theirs, steps)))
            else:
                second = take(theirs, steps)
                turns.append((take(ours, steps), second))
        run.close()
    return summary(turns)


def with_unisono(run: unisono.Run, name: str, data: TensorDataset, epochs: int) -> Iterator[float]:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.prepare(model, optimizer)
    for step in run.steps(data, epochs):
        yield step.run(loss_fn)


def plain(name: str, data: TensorDataset, epochs: int) -> Iterator[float]:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(epochs):
        order = sample_order(0, epoch, len(data))(torch.arange(len(data)).numpy())
        for batch in DataLoader(Subset(data, order.tolist()), batch_size=BATCH):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            yield loss.item()


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def images(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 1, 32, 32, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (count,), generator=generator))


def take(loop: Iterator[float], steps: int) -> tuple[float, list[float]]:
    """Seconds per step, and the losses."""
    losses: list[float] = []
    begun = perf_counter()
    losses.extend(next(loop) for _ in range(steps))
    return (perf_counter() - begun) / steps, losses


def summary(turns: list[tuple[tuple[float, list[float]], tuple[float, list[float]]]]) -> dict[str, object]:
    counted = turns[1:]
    ratios = [ours / theirs for (ours, _), (theirs, _) in counted]
    return {
        "unisono_ms": 1000 * statistics.median(ours for (ours, _), _ in counted),
        "plain_ms": 1000 * statistics.median(theirs for _, (theirs, _) in counted),
        "ratio": statistics.median(ratios),
        "interval": bootstrap(ratios),
        "same_losses": all(ours == theirs for (_, ours), (_, theirs) in turns),
    }


def bootstrap(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """A 95 % interval of the median."""
    generator = random.Random(0)  # noqa: S311
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


if __name__ == "__main__":
    main()
