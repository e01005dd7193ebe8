"""One worker is three times slower: what asynchronous strategies gain, and what may be done about stale gradients."""

import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import cast

import torch
import torch.nn.functional as F

from benchmarks import training_spec
from benchmarks.exercise import Exercise, Outcome
from benchmarks.figures import counted, times_as_fast
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.strategies import ALL, Runs, learn, spread
from unisono.reduce.buckets import pack, unpack
from unisono.sync import strategy_of
from unisono.train.model.prepared import Prepared
from unisono_lab.strategies.asynchronous_server import CentralWeights
from unisono_lab.strategies.parameter_server import ParameterServer
from unisono_lab.strategies.rpc_message import RpcMessage

PLAIN = "parameter-server:synchronous=false"
TREATED = {
    "plain": PLAIN,
    "staleness-aware": f"{PLAIN},staleness_aware=true",
    "compensated, λ = 0.04": f"{PLAIN},delay_compensation=0.04",
    "compensated, λ = 1": f"{PLAIN},delay_compensation=1.0",
    "both, λ = 0.04": f"{PLAIN},staleness_aware=true,delay_compensation=0.04",
}

Key = tuple[float, int, str]
"""A rate, a number of workers, a way to treat stale gradients."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        strategies: whose throughput is compared.
        workers: of these jobs.
        rounds: fresh jobs of each.
        epochs: of each.
        slow: how many times slower one worker is.
        shard_ms: that a shard takes to compute, asleep.
        crowd: numbers of workers in turns, each of whose gradients is as stale as there are others.
        rates: of learning, with stale gradients.
        seeds: of each of these trainings.
        stale_epochs: of each of these trainings.
    """

    strategies: tuple[str, ...] = ALL
    workers: int = 2
    rounds: int = 3
    epochs: int = 2
    slow: float = 3.0
    shard_ms: float = 10.0
    crowd: tuple[int, ...] = (9,)
    rates: tuple[float, ...] = (0.05, 0.1, 0.5)
    seeds: int = 5
    stale_epochs: int = 40

    def timed(self, strategy: str, seed: int) -> Exercise:
        """A training whose throughput counts."""
        return Exercise(
            model="mlp",
            strategy=strategy,
            seed=seed,
            epochs=self.epochs,
            batch_size=32,
            rate=0.1,
            shard_ms=self.shard_ms,
            slow=self.slow,
        )


def run(choice: Choice) -> Report:
    """Both."""
    meter, order = NoiseMeter(), random.Random(0)  # noqa: S311  the order is to be repeatable
    timed = throughputs(choice, meter, order)
    judged = accuracies(choice)
    return Report(
        name="strategies-slow",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[speed_grid(choice, timed), *stale_grids(choice, judged)],
        figures={
            "throughput": {name: [one and one.model_dump() for one in runs] for name, runs in timed.items()},
            "stale": [
                {"rate": rate, "workers": workers, "way": way, "accuracies": runs}
                for (rate, workers, way), runs in judged.items()
            ],
        },
    )


def throughputs(choice: Choice, meter: NoiseMeter, order: random.Random) -> dict[str, list[Outcome | None]]:
    """The strategies take turns, in another order in each round."""
    found: dict[str, list[Outcome | None]] = {strategy: [] for strategy in choice.strategies}
    for number in range(choice.rounds):
        meter.calibrate()
        names = order.sample(choice.strategies, len(choice.strategies))
        ended = learn(choice.workers, [choice.timed(strategy, number) for strategy in names])
        for strategy, outcome in zip(names, ended, strict=True):
            found[strategy].append(outcome)
    return found


def accuracies(choice: Choice) -> dict[Key, list[float]]:
    """For each rate: alone, and with stale gradients that are treated in one way or another; for each seed."""
    torch.set_num_threads(1)
    alone = [(rate, 1, "plain") for rate in choice.rates]
    return {
        (rate, workers, way): [
            stale_accuracy(choice, TREATED[way], rate, workers, seed) for seed in range(choice.seeds)
        ]
        for rate, workers, way in (*alone, *product(choice.rates, choice.crowd, TREATED))
    }


def stale_accuracy(choice: Choice, strategy: str, rate: float, workers: int, seed: int) -> float:
    """Train in this process, with a server as it is in jobs, and workers that take turns.

    Each reads the weights right after its push, and pushes again when all others have: but for the first turn the
    staleness of each gradient is the number of the others, whatever else this machine does.
    """
    torch.manual_seed(seed)
    training, held_out = training_spec.digits()
    images, labels = training.tensors
    model = training_spec.network()
    prepared = Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=rate)])
    parameters = list(prepared.parameters.values())
    server = CentralWeights(cast("ParameterServer", strategy_of(strategy)), prepared, range(len(parameters)))
    read = [server.pull(worker) for worker in range(workers)]
    for turn, chosen in enumerate(batches(len(images), choice.stale_epochs, seed)):
        worker = turn % workers
        take(parameters, read[worker])
        model.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        about = {"used": [True] * len(gradients), "optimizers": [(0, [{"lr": rate}])]}
        server.push(worker, RpcMessage({**about, "version": read[worker].values["version"]}, pack(gradients)))
        read[worker] = server.pull(worker)
    take(parameters, server.pull(0))
    with torch.no_grad():
        told = model(held_out.tensors[0]).argmax(1)
    return float((told == held_out.tensors[1]).float().mean())


def batches(samples: int, epochs: int, seed: int) -> Iterator[torch.Tensor]:
    """Of 32 samples each."""
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(samples, generator=order).split(32)


@torch.no_grad()
def take(parameters: list[torch.Tensor], message: RpcMessage) -> None:
    """The weights that a server has sent."""
    for mine, theirs in zip(parameters, unpack(message.packed, parameters), strict=True):
        mine.copy_(theirs)


def speed_grid(choice: Choice, timed: Mapping[str, Runs]) -> Grid:
    """Throughput beside that of the synchronous strategy."""
    rows = []
    for name, runs in timed.items():
        pairs = [(one, other) for one, other in zip(runs, timed[choice.strategies[0]], strict=True) if one and other]
        seconds = [(one.seconds / one.samples, other.seconds / other.samples) for one, other in pairs]
        stale = [tau for one, _ in pairs for tau in one.staleness]
        rows.append(
            (
                name,
                f"{statistics.median(one.samples_per_s for one, _ in pairs):.0f}",
                f"{times_as_fast([a for a, _ in seconds], [b for _, b in seconds]):.2f}",
                f"{statistics.fmean(stale):.2f}, {max(stale)}" if stale else "",
            )
        )
    return Grid(
        f"{counted(choice.workers, 'worker')}, of which one is {choice.slow:g} times slower: throughput",
        ("", "samples/s", f"beside {choice.strategies[0]}", "staleness"),
        rows,
        (f"Medians of {counted(choice.rounds, 'job')} each; a shard takes {choice.shard_ms:g} ms, asleep.",),
    )


def stale_grids(choice: Choice, judged: Mapping[Key, list[float]]) -> list[Grid]:
    """What treating stale gradients does to the accuracy, for each rate."""
    return [stale_grid(choice, rate, judged) for rate in choice.rates]


def stale_grid(choice: Choice, rate: float, judged: Mapping[Key, list[float]]) -> Grid:
    """What treating stale gradients does to the accuracy."""
    rows = []
    for (its_rate, workers, way), found in judged.items():
        if its_rate == rate:
            plain = judged[(rate, workers, "plain")]
            points = [100 * (one - other) for one, other in zip(found, plain, strict=True)]
            name = "serial" if workers == 1 else f"{way}, staleness {workers - 1}"
            told = f"{statistics.fmean(found):.2%} ({min(found):.2%} … {max(found):.2%})"
            rows.append((name, told, spread(points) if way != "plain" else ""))
    return Grid(
        f"Plain SGD with rate {rate:g}, {counted(choice.seeds, 'seed')}: accuracy with stale gradients",
        ("", "accuracy (lowest … highest)", "beside plain, points"),
        rows,
    )
