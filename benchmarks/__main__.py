"""The command line: ``python -m benchmarks COMMAND``."""

import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import (
    accuracy,
    adaptive,
    allreduce,
    coordinator,
    coordinator_sockets,
    data_network,
    device_memory,
    disturbed,
    finite_looks,
    fixed_cost,
    flips,
    growth,
    guests,
    kfac,
    looking,
    network,
    numerics,
    pairs,
    pictures,
    recovery,
    sampling,
    second_order,
    shards,
    shuffles,
    simulated_day,
    simulation,
    soak,
    stale,
    step,
    strategies,
    topologies,
)
from benchmarks.contenders import everybody
from benchmarks.crew import Allocator, CrewFailed
from benchmarks.frameworks import COMPARISONS
from benchmarks.link import Cable, NoLink
from benchmarks.open_files import TooFewFiles
from benchmarks.report import RESULTS, Report
from benchmarks.stage import StageFailed
from benchmarks.strangers import Siege
from benchmarks.task import Update
from benchmarks.workloads import WORKLOADS
from unisono.errors import LaunchError
from unisono.sync import strategy_of

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)

Models = Annotated[list[str] | None, typer.Option("--model", help=f"one of {', '.join(WORKLOADS)}; repeat for more")]
Workers = Annotated[int, typer.Option(help="processes that train together")]
Rounds = Annotated[int | None, typer.Option(help="how often each thing is measured, in fresh processes")]
Malloc = Annotated[Allocator, typer.Option(help="tuned: as unisono run sets it; the same for all")]
Sgd = Annotated[Update, typer.Option(help="which of torch's implementations of SGD; the same for all")]
Seed = Annotated[int, typer.Option(help="of the order in which things are measured")]
Seeds = Annotated[int, typer.Option(min=1, help="runs of each way of training")]
Quick = Annotated[bool, typer.Option("--quick", help="only see that it works: the figures mean nothing")]
Output = Annotated[Path, typer.Option(help="folder for JSON and plot")]


@app.command("step")
def step_command(
    model: Models = None,
    only: Annotated[list[str] | None, typer.Option(help="key of a contender; repeat for more")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="also Unisono with such settings: 'overlap=false bucket_mb=4'; repeat")
    ] = None,
    workers: Workers = 2,
    threads: Annotated[int, typer.Option(help="torch threads of each worker")] = 1,
    rounds: Rounds = None,
    steps: Annotated[int | None, typer.Option(help="counted in each run")] = None,
    allocator: Malloc = "tuned",
    update: Sgd = "default",
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """A training step: Unisono, the plain loop, DDP, Lightning Fabric, Accelerate."""
    known = [one.key for one in everybody(workers, threads)]
    choice = step.Choice(
        models=_models(model, ("tiny",) if quick else step.Choice().models),
        only=_known(only, known, "--only"),
        settings=tuple(setting or ()),
        workers=workers,
        threads=threads,
        rounds=rounds or (1 if quick else 5),
        steps=steps or (2 if quick else 10),
        warm_up=1 if quick else 3,
        update=update,
        allocator=allocator,
        seed=seed,
    )
    try:
        choice.contenders()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--setting") from error
    _publish(step.run(choice), output)


@app.command("allreduce")
def allreduce_command(
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, help="how many reduce together")] = 2,
    rounds: Rounds = None,
    size: Annotated[list[int] | None, typer.Option(help="bytes; repeat for more")] = None,
    allocator: Malloc = "tuned",
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """The all-reduce alone: shared memory, Gloo, and the memory's bandwidth."""
    choice = allreduce.Choice(
        workers=workers,
        sizes=tuple(size or (allreduce.SIZES[:3] if quick else allreduce.SIZES)),
        rounds=rounds or (1 if quick else 5),
        turns=2 if quick else 9,
        allocator=allocator,
        seed=seed,
    )
    _publish(allreduce.run(choice), output)


@app.command("shards")
def shards_command(
    model: Models = None,
    workers: Workers = 2,
    rounds: Rounds = None,
    turns: Annotated[int | None, typer.Option(help="of each loop in a run")] = None,
    steps: Annotated[int, typer.Option(help="in a turn")] = 3,
    allocator: Malloc = "tuned",
    update: Sgd = "default",
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """More shards than workers; exact beside native; one worker beside the plain loop."""
    choice = shards.Choice(
        models=_models(model, ("tiny",) if quick else shards.Choice().models),
        workers=workers,
        rounds=rounds or (1 if quick else 5),
        turns=turns or (2 if quick else 8),
        steps=steps,
        update=update,
        allocator=allocator,
        seed=seed,
    )
    _publish(shards.run(choice), output)


@app.command("fixed-cost")
def fixed_cost_command(
    workers: Workers = 2,
    rounds: Rounds = None,
    turns: Annotated[int | None, typer.Option(help="of each loop in a run")] = None,
    steps: Annotated[int, typer.Option(help="in a turn")] = 50,
    allocator: Malloc = "tuned",
    update: Sgd = "default",
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What a step costs that computes next to nothing: the plain loop, DDP and Unisono."""
    choice = shards.Choice(
        models=("nothing",),
        workers=workers,
        rounds=rounds or (1 if quick else 3),
        turns=turns or (2 if quick else 20),
        steps=steps,
        update=update,
        allocator=allocator,
        seed=seed,
    )
    _publish(fixed_cost.measure(choice), output)


@app.command("network")
def network_command(
    rate: Annotated[str, typer.Option(help="of the cable, as tc says it")] = "1gbit",
    delay: Annotated[str, typer.Option(help="of the cable, one way, as tc says it")] = "1ms",
    model: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "tower",
    batch_size: Annotated[int | None, typer.Option(help="by default found: communication = computation")] = None,
    topology: Annotated[str, typer.Option(help="of Unisono's sums")] = "auto",
    bucket_mb: Annotated[float | None, typer.Option(help="of Unisono's buckets; by default its own")] = None,
    rounds: Rounds = None,
    allocator: Malloc = "tuned",
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """A slow network between two hosts, made with namespaces and tc: needs root."""
    choice = network.Choice(
        cable=Cable(rate, delay),
        model=_models([model], ())[0],
        batch_size=batch_size,
        topology=topology,
        bucket_mb=bucket_mb,
        rounds=rounds or (1 if quick else 5),
        steps=3 if quick else 10,
        warm_up=1 if quick else 3,
        allocator=allocator,
        seed=seed,
    )
    try:
        _publish(network.run(choice), output)
    except NoLink as reason:
        print(f"Skipped: a slow network cannot be made here: {reason}")
    except CrewFailed as failure:
        print(f"No batch size could be found:\n{failure}")
        raise typer.Exit(1) from failure


@app.command("data-network")
def data_network_command(
    rate: Annotated[list[str] | None, typer.Option(help="of a cable, as tc says it; repeat for more")] = None,
    size: Annotated[list[int] | None, typer.Option(help="bytes of a bucket; repeat for more")] = None,
    rounds: Rounds = None,
    seed: Seed = 0,
    model: Models = None,
    calls: Annotated[int, typer.Option(help="of strangers beside a job, in the end; 0 to leave that out")] = 10_000,
    only_strangers: Annotated[bool, typer.Option("--only-strangers", help="that alone")] = False,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """The network between hosts: Gloo, our own sockets, and these with TLS: needs root."""
    usual = data_network.Choice()
    choice = data_network.Choice(
        cables=()
        if only_strangers
        else tuple(Cable(each) for each in rate or ()) or usual.cables[: 1 if quick else None],
        sizes=tuple(size or (usual.sizes[:2] if quick else usual.sizes)),
        rounds=rounds or (1 if quick else usual.rounds),
        turns=2 if quick else usual.turns,
        models=_models(model, ("tiny",) if quick else usual.models),
        seed=seed,
        siege=Siege(calls, turns=2 if quick else Siege().turns) if calls else None,
    )
    try:
        _publish(data_network.run(choice), output)
    except NoLink as reason:
        print(f"Skipped: two hosts cannot be made here: {reason}")


@app.command("topologies")
def topologies_command(
    rate: Annotated[str, typer.Option(help="of each host's cable, as tc says it")] = "200mbit",
    delay: Annotated[str, typer.Option(help="of a cable, one way, as tc says it")] = "1ms",
    workers: Annotated[list[int] | None, typer.Option("--workers", "-n", min=2, help="hosts; repeat for more")] = None,
    size: Annotated[list[int] | None, typer.Option(help="bytes of a bucket; repeat for more")] = None,
    turns: Annotated[int | None, typer.Option(help="of each way, for each size")] = None,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """Ring, tree, star, direct and a server over a slow network: predicted and measured."""
    usual = topologies.Choice()
    choice = topologies.Choice(
        cable=replace(usual.cable, rate=rate, delay=delay),
        workers=tuple(workers or ((2,) if quick else usual.workers)),
        sizes=tuple(size or (usual.sizes[:2] if quick else usual.sizes)),
        turns=turns or (1 if quick else usual.turns),
        seed=seed,
    )
    try:
        _publish(topologies.run(choice), output)
    except NoLink as reason:
        print(f"Skipped: a slow network cannot be made here: {reason}")


@app.command("recovery")
def recovery_command(
    model: Models = None,
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, help="that train together")] = 3,
    kills: Annotated[int | None, typer.Option(help="of one of them, one after the other")] = None,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """A worker is killed: how long the others stand still, and how soon a new one takes part."""
    choice = recovery.Choice(
        models=_models(model, ("tiny",) if quick else recovery.Choice().models),
        workers=workers,
        kills=kills or (2 if quick else 20),
        seed=seed,
    )
    _publish(recovery.run(choice), output)


@app.command("growth")
def growth_command(
    model: Models = None,
    rounds: Rounds = None,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """Workers come and go: how long the others stand still, and what it costs them that one starts beside them."""
    choice = growth.Choice(
        _models(model, ("tiny",) if quick else growth.Choice().models), rounds or (1 if quick else 10)
    )
    _publish(growth.run(choice), output)


@app.command("coordinator-sockets")
def coordinator_sockets_command(
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="connected at first")] = 1024,
    processes: Annotated[int, typer.Option(min=1, help="in which all of them live")] = 4,
    seconds: Annotated[float, typer.Option(min=0.0, help="of heartbeats alone")] = 20.0,
    losses: Annotated[int, typer.Option(min=0, help="of a worker, one after the other")] = 10,
    joins: Annotated[int, typer.Option(min=0, help="of a worker, one after the other")] = 10,
    probes: Annotated[bool, typer.Option("--probes", help="agents answer probes")] = False,
    seed: Annotated[int, typer.Option(help="of who is lost")] = 0,
    output: Output = RESULTS,
) -> None:
    """A coordinator with many connections over TLS: memory, processor, delays, losses and joins."""
    if losses >= workers:
        raise typer.BadParameter(f"{losses}: of {workers} workers, one stays", param_hint="--losses")
    choice = coordinator_sockets.Choice(
        workers=workers, processes=processes, seconds=seconds, losses=losses, joins=joins, probes=probes, seed=seed
    )
    try:
        _publish(coordinator_sockets.run(choice), output)
    except TooFewFiles as error:
        raise typer.BadParameter(str(error), param_hint="--workers") from error
    except (StageFailed, LaunchError) as failure:
        print(f"Not measured: {failure}")
        raise typer.Exit(1) from failure


@app.command("disturbed")
def disturbed_command(
    rounds: Rounds = None,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """A worker or a connection becomes slow: what a policy gets back of what that costs."""
    choice = disturbed.Choice(rounds=rounds or (1 if quick else 5), seed=seed)
    if quick:
        choice = replace(choice, steps=60, counted=10, at_step=20, shard_ms=2.0, elements=2**12)
    _publish(disturbed.run(choice), output)


StepMs = Annotated[float, typer.Option(help="of a step, about: decides the batch")]
Turns = Annotated[int | None, typer.Option(help="of each job in a round")]


@app.command("pinning")
def pinning_command(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "narrow",
    workers: Workers = 2,
    step_ms: StepMs = 50.0,
    busy: Annotated[int, typer.Option(min=0, help="processes of others beside, each of which keeps a core busy")] = 0,
    rounds: Rounds = None,
    turns: Turns = None,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What it brings or costs to pin workers to cores of their own: beside a job whose workers run where they want."""
    choice = replace(_side_by_side("pinning", model, workers, step_ms, quick=quick), busy=busy)
    _publish(pairs.run(_often(choice, rounds, turns, seed)), output)


@app.command("elastic")
def elastic_command(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "narrow",
    workers: Workers = 2,
    step_ms: StepMs = 50.0,
    rounds: Rounds = None,
    turns: Turns = None,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What it costs to be elastic while nothing happens: beside a job whose workers stay the same."""
    choice = _side_by_side("elastic", model, workers, step_ms, quick=quick)
    _publish(pairs.run(_often(choice, rounds, turns, seed)), output)


@app.command("page")
def page_command(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "narrow",
    workers: Workers = 2,
    step_ms: StepMs = 30.0,
    rounds: Rounds = None,
    turns: Turns = None,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What it costs training that somebody looks at its page: beside a job that has none."""
    choice = _side_by_side("page", model, workers, step_ms, quick=quick)
    report = pairs.run(_often(choice, rounds, turns, seed))
    spent = looking.processor_time(workers, step_ms, 2.0 if quick else 20.0)
    _publish(replace(report, grids=[*report.grids, spent]), output)


@app.command("pictures")
def pictures_command(
    output: Annotated[Path, typer.Option(help="folder of the pictures")] = Path("docs/guide/pictures"),
) -> None:
    """Train digits for a minute while workers come and go, and take the pictures of the page that the guide shows."""
    pictures.take(output)


@app.command("guests")
def guests_command(
    only: Annotated[list[str] | None, typer.Option(help=f"one of {', '.join(COMPARISONS)}; repeat for more")] = None,
    step_ms: StepMs = 50.0,
    rounds: Rounds = None,
    turns: Turns = None,
    seed: Seed = 0,
    batch: Annotated[int | None, typer.Option(help="samples of a batch, if --step-ms is not to decide them")] = None,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What a run costs frameworks that train on it: each alone and with Unisono."""
    chosen = _known(only, COMPARISONS, "--only") or tuple(COMPARISONS)
    often = {"rounds": rounds or (1 if quick else 3), "turns": turns or (1 if quick else 12)}
    _publish(guests.run(guests.Choice(chosen, step_ms, seed=seed, batch=batch, **often)), output)


@app.command("monitor")
def monitor_command(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "mlp",
    workers: Workers = 2,
    step_ms: StepMs = 150.0,
    rounds: Rounds = None,
    turns: Turns = None,
    all_read: Annotated[bool, typer.Option("--all", help="read all of large gradients, and not some blocks")] = False,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What it costs to measure the gradients' noise in every step: beside a job that does not."""
    choice = _side_by_side("monitor-all" if all_read else "monitor", model, workers, step_ms, quick=quick)
    _publish(pairs.run(_often(choice, rounds, turns, seed)), output)


@app.command("timeline")
def timeline_command(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "narrow",
    workers: Workers = 2,
    step_ms: StepMs = 30.0,
    rounds: Rounds = None,
    turns: Turns = None,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What it costs to write down what each worker does when: beside a job that does not."""
    choice = _side_by_side("timeline", model, workers, step_ms, quick=quick)
    _publish(pairs.run(_often(choice, rounds, turns, seed)), output)


@app.command("checks")
def checks_command(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "mlp",
    workers: Workers = 2,
    step_ms: StepMs = 150.0,
    rounds: Rounds = None,
    turns: Turns = None,
    everything: Annotated[bool, typer.Option("--all", help="check all of large gradients, too")] = False,
    audit: Annotated[bool, typer.Option("--audit", help="instead: compute a hundredth of the work twice")] = False,
    state: Annotated[bool, typer.Option("--state", help="instead: weights and all that goes with them")] = False,
    finite: Annotated[
        bool, typer.Option("--finite", help="instead: whether gradients of all models are finite")
    ] = False,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What it costs to check gradients, results or the state in every step: beside a job that does not."""
    if finite:
        models, steps, repeats = (("tiny",), 5, 1) if quick else (("mlp", "resnet", "gpt"), 20, rounds or 3)
        _publish(finite_looks.run(models, steps, repeats), output)
        return
    pair = "state" if state else "audit" if audit else "checks-all" if everything else "checks"
    choice = _side_by_side(pair, model, workers, step_ms, quick=quick)
    _publish(pairs.run(_often(choice, rounds, turns, seed)), output)


@app.command("flips")
def flips_command(
    number: Annotated[int, typer.Option("--flips", "-n", min=1, help="how many")] = 300,
    any_time: Annotated[
        bool, typer.Option("--any-time", help="of one worker, at moments that are drawn in time")
    ] = False,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """Bits that flip at drawn places and moments of small trainings: none may end in other weights.

    With --any-time some may: those that strike while an update is made, which one worker alone does not see.
    """
    _publish(flips.run(flips.Choice(40 if quick else number, seed, any_time)), output)


@app.command("coordinator")
def coordinator_command(
    workers: Annotated[list[int] | None, typer.Option("--workers", "-n", min=1, help="repeat for more")] = None,
    per_host: Annotated[int, typer.Option(min=1, help="workers of each host")] = 8,
    probes: Annotated[bool, typer.Option("--probes", help="agents answer probes")] = False,
    seed: Seed = 0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What the coordinator costs, by the number of workers: all of it but the sockets."""
    sizes = tuple(workers or ((4, 16) if quick else coordinator.SIZES))
    few = {"beats": 20, "losses": 1} if quick else {}
    _publish(coordinator.run(coordinator.Choice(sizes, per_host, probes=probes, seed=seed, **few)), output)


@app.command("simulated-day")
def simulated_day_command(
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, max=20_000, help="eight a host")] = 10_000,
    events: Annotated[int, typer.Option(min=1, help="workers that are killed in the day")] = 500,
    share: Annotated[float, typer.Option(min=0.001, max=1.0, help="of the day, with its share of the events")] = 1.0,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """A day of a job on thousands of workers in virtual time: processor time and peak memory."""
    choice = simulated_day.Choice(16, 500, 0.01) if quick else simulated_day.Choice(workers, events, share)
    _publish(simulated_day.run(choice), output)


@app.command("second-order")
def second_order_command(
    model: Models = None,
    workers: Workers = 2,
    rounds: Rounds = None,
    steps: Annotated[int, typer.Option(help="counted in each job")] = 20,
    seed: Seed = 0,
    quick: Quick = False,
    with_kfac: Annotated[bool, typer.Option("--kfac", help="K-FAC beside SGD and AdamW instead")] = False,
    output: Output = RESULTS,
) -> None:
    """Muon: every worker updates all matrices, or each has one owner. With --kfac: K-FAC beside SGD and AdamW."""
    if with_kfac:
        _publish(kfac.run(1 if quick else 5), output)
        return
    choice = second_order.Choice(
        models=_models(model, ("tiny",) if quick else second_order.Choice().models),
        workers=workers,
        rounds=rounds or (1 if quick else 5),
        steps=2 if quick else steps,
        seed=seed,
        seeds=1 if quick else 5,
    )
    _publish(second_order.run(choice), output)


@app.command("shuffles")
def shuffles_command(
    samples: Annotated[int, typer.Option(help="of a kilobyte each")] = 100_000,
    block_size: Annotated[int, typer.Option(help="samples in a compressed block")] = 1000,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """The shuffle by blocks beside the full one, on a data set of compressed blocks."""
    choice = shuffles.Choice(samples, block_size)
    _publish(shuffles.run(shuffles.Choice(4000, 100, (2, 4), 20, 1) if quick else choice), output)


@app.command("numerics")
def numerics_command(
    only: Annotated[list[str] | None, typer.Option(help="words of an operation's name; repeat for more")] = None,
    turns: Annotated[int, typer.Option(help="of each operation at each level")] = 15,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What portable numerics cost: operations and training steps beside native ones, in turns."""
    names = numerics.Choice().names
    chosen = tuple(name for name in names if any(words in name for words in only)) if only else names
    _publish(numerics.run(numerics.Choice(chosen, 1 if quick else turns)), output)


@app.command("sampling")
def sampling_command(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "mlp",
    steps: Annotated[int, typer.Option(help="to train, twice")] = 60,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """What reading only some blocks of a gradient does to the figures."""
    known = _models([model], ())[0]
    _publish(sampling.run(sampling.Choice(known, 8 if quick else steps)), output)


def _side_by_side(pair: str, model: str, workers: int, step_ms: float, *, quick: bool) -> pairs.Choice:
    rounds, turns = (1, 1) if quick else (3, 12)
    known = _models([model], ())[0]
    return pairs.Choice(pair, known, workers=workers, step_ms=step_ms, rounds=rounds, turns=turns)


def _often(choice: pairs.Choice, rounds: int | None, turns: int | None, seed: int) -> pairs.Choice:
    return replace(choice, rounds=rounds or choice.rounds, turns=turns or choice.turns, seed=seed)


@app.command("device-memory")
def device_memory_command(
    devices: Annotated[str, typer.Option(help="numbers of them; commas between them")] = "2,4",
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """The most memory that tensors take on a device: one with the whole model, and several that hold it together."""
    numbers = tuple(int(number) for number in devices.split(","))
    choice = device_memory.Choice((2,), 2, 1) if quick else device_memory.Choice(numbers)
    _publish(device_memory.run(choice), output)


@app.command("accuracy")
def accuracy_command(
    seeds: Seeds = 5,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """AdaScale at eight times the batch, beside the small batch and plain linear scaling: accuracies."""
    choice = accuracy.Choice(1, iterations=80, rates=(0.1,)) if quick else accuracy.Choice(seeds)
    _publish(accuracy.run(choice), output)


@app.command("adaptive")
def adaptive_command(
    seeds: Seeds = 5,
    epochs: Annotated[int, typer.Option(help="passes over the data")] = 40,
    workers: Workers = 1,
    target: Annotated[float, typer.Option(help="the accuracy that is to be reached")] = 0.9,
    few: Annotated[bool, typer.Option("--few", help="only one way of each kind, and none for comparison")] = False,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """A batch that follows the noise, beside batches that stay: how soon it is accurate."""
    few = few or quick
    choice = adaptive.Choice(1 if quick else seeds, 3 if quick else epochs, workers, target, few=few)
    _publish(adaptive.run(choice), output)


@app.command("strategies")
def strategies_command(
    models: Annotated[str, typer.Option(help="of digits, char_lm; commas between them")] = "digits,char_lm",
    workers: Annotated[str, typer.Option(help="numbers of them; commas between them")] = "2,4",
    seeds: Seeds = 3,
    strategy: Annotated[list[str] | None, typer.Option(help="one of them, as its text; repeat for more")] = None,
    epochs: Annotated[int, typer.Option(help="passes over the data; 0 for each model's own")] = 0,
    rate: Annotated[list[float] | None, typer.Option(help="of learning; repeat for more: the best counts")] = None,
    slow: Annotated[bool, typer.Option("--slow", help="instead: one worker is three times slower")] = False,
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """Every synchronisation strategy on the same trainings: accuracy, loss, traffic, throughput, staleness."""
    chosen = tuple(str(strategy_of(one)) for one in strategy or strategies.ALL)
    if slow:
        few = {"rounds": 1, "epochs": 2, "rates": (0.1,), "seeds": 1, "crowd": (5,), "stale_epochs": 1}
        _publish(stale.run(stale.Choice(chosen, **(few if quick else {}))), output)  # type: ignore[arg-type]
        return
    named = tuple(
        name for name in strategies.SHAPES if name in _known(models.split(","), strategies.SHAPES, "--models")
    )
    numbers = tuple(int(number) for number in workers.split(","))
    rates = (3e-3,) if quick else tuple(rate or ())
    choice = strategies.Choice(named, numbers, 1 if quick else seeds, chosen, 1 if quick else epochs, rates)
    _publish(strategies.run(choice), output)


@app.command("simulation")
def simulation_command(
    only: Annotated[list[str] | None, typer.Option(help="the name of a job; repeat for more")] = None,
    kept: Annotated[str, typer.Option(help="a folder in which recordings stay, and are read again")] = "",
    quick: Quick = False,
    output: Output = RESULTS,
) -> None:
    """Elastic jobs are recorded, and predicted from their first part by what unisono simulate uses."""
    names = _known(only, simulation.Choice().plans, "--only") or simulation.Choice().plans[: 2 if quick else None]
    _publish(simulation.run(simulation.Choice(names, kept)), output)


@app.command("soak")
def soak_command(
    minutes: Annotated[float, typer.Option(help="with faults")] = 30.0,
    pause_s: Annotated[float, typer.Option("--pause", help="seconds between two faults, on average")] = 3.0,
    rare_s: Annotated[float, typer.Option("--rare", help="seconds between two ends of what is to live long")] = 240.0,
    largest: Annotated[int, typer.Option("--workers", "-n", min=2, help="at most")] = 4,
    compare: Annotated[bool, typer.Option(help="the weights with a serial run's, which takes its time")] = True,
    seed: Seed = 0,
    output: Output = RESULTS,
) -> None:
    """Half an hour of faults: memory, files and threads stay as they are, and no process is left."""
    choice = soak.Choice(
        minutes, pause_s, largest, look_s=min(5.0, 6 * minutes), rare_s=rare_s, compare=compare, seed=seed
    )
    _publish(soak.run(choice), output)


def _models(given: list[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return _known(given, WORKLOADS, "--model") or default


def _known(given: list[str] | None, known: Iterable[str], option: str) -> tuple[str, ...]:
    names = list(known)
    if unknown := [name for name in given or () if name not in names]:
        raise typer.BadParameter(f"{', '.join(unknown)}: use {', '.join(names)}", param_hint=option)
    return tuple(given or ())


def _publish(report: Report, folder: Path) -> None:
    report.publish(folder)
    if report.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    # An end by SIGTERM is an orderly one too: the workers are ended with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app()
