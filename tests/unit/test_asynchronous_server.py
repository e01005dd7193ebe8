"""Servers of the asynchronous form do what the formulas say, one update after the other."""

import json
import platform
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from side_by_side import PATIENCE_S, side_by_side
from unisono.errors import ModelError, NoProgress, WorkerLost
from unisono.reduce.buckets import pack, unpack
from unisono.sync import Strategy
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.update import hyperparameters_of, set_hyperparameters
from unisono.train.strategies.synchroniser import SyncContext, set_states, states_of
from unisono_lab import PairAveraging
from unisono_lab.strategies.asynchronous_server import AsynchronousServer, CentralWeights
from unisono_lab.strategies.parameter_server import ParameterServer
from unisono_lab.strategies.replicas import Pairs
from unisono_lab.strategies.rpc_message import RpcMessage

pytestmark = pytest.mark.unit

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def prepared(make: Make = OPTIMIZERS["SGD"]) -> Prepared:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Prepared.of(model, [make(model.parameters())])


def weights_of(known: Prepared) -> list[Tensor]:
    return [parameter.detach() for parameter in known.parameters.values()]


def gradients(seed: int, like: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tensor.shape, generator=generator) for tensor in like]


def set_gradients(known: Prepared, found: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(known.parameters.values(), found, strict=True):
        parameter.grad = gradient


def strategy(**settings: Any) -> ParameterServer:
    return ParameterServer(synchronous=False, **settings)


# -- one server


def message(version: int, found: Sequence[Tensor], rate: float, used: Sequence[bool] | None = None) -> RpcMessage:
    about = {"optimizers": [(0, [{"lr": rate}])], "version": version, "used": used or [True] * len(found)}
    return RpcMessage(about, pack(found))


READ = [0, 0, 2, 0, 3, 3, 1]
"""The version that each of some gradients was computed on, in the order in which they come."""


@pytest.mark.parametrize("aware", [False, True])
def test_the_rate_is_divided_by_the_staleness_if_this_is_wanted(aware: bool) -> None:
    known = prepared(lambda parameters: torch.optim.SGD(parameters, lr=1000.0, momentum=0.9))
    central = CentralWeights(strategy(staleness_aware=aware), known, range(len(known.parameters)))
    for number, version in enumerate(READ):
        central.push(number % 3, message(version, gradients(number, central.weights), 0.1))
    staleness = central.staleness()
    assert staleness == [0, 1, 0, 3, 1, 2, 5]
    expected = [weight.double() for weight in weights_of(prepared())]
    velocity = [torch.zeros_like(weight) for weight in expected]
    for number, stale in enumerate(staleness):
        for weight, speed, gradient in zip(expected, velocity, gradients(number, expected), strict=True):
            speed.mul_(0.9).add_(gradient.double())
            weight.sub_(0.1 / (max(1, stale) if aware else 1) * speed)
    for mine, theirs in zip(central.weights, expected, strict=True):
        torch.testing.assert_close(mine.detach().double(), theirs, rtol=1e-5, atol=1e-6)


def test_delay_compensation_adds_what_the_gradient_squared_says_of_the_way_since_the_read() -> None:
    known = prepared(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    central = CentralWeights(strategy(delay_compensation=0.04), known, range(len(known.parameters)))
    expected = [weight.double() for weight in weights_of(known)]
    read: dict[int, list[Tensor]] = {}
    versions: dict[int, int] = {}
    for number, (worker, does) in enumerate(
        [(0, "pull"), (1, "pull"), (1, "push"), (1, "pull"), (2, "pull"), (1, "push"), (0, "push"), (2, "push")]
    ):
        if does == "pull":
            versions[worker] = central.pull(worker).values["version"]
            read[worker] = [weight.clone() for weight in expected]
            continue
        found = gradients(number, expected)
        central.push(worker, message(versions[worker], found, 0.5))
        for weight, was, gradient in zip(expected, read[worker], found, strict=True):
            g = gradient.double()
            weight.sub_(0.5 * (g + 0.04 * g * g * (weight - was)))
    for mine, theirs in zip(central.weights, expected, strict=True):
        torch.testing.assert_close(mine.detach().double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_server_goes_on_with_what_the_optimizer_has_kept_and_leaves_it_as_it_is(name: str) -> None:
    known = prepared(OPTIMIZERS[name])
    set_gradients(known, gradients(1, weights_of(known)))
    known.optimizers[0].step()
    before = [weight.clone() for weight in weights_of(known)]
    numbers = (1, 2, 5)
    central = CentralWeights(strategy(), known, numbers)
    rate = known.optimizers[0].param_groups[0]["lr"]
    central.push(0, message(0, gradients(2, central.weights), rate))
    assert all(map(torch.equal, weights_of(known), before))
    assert len(known.optimizers[0].state) == len(known.parameters)
    assert len(central.optimizers[0].state) == len(numbers)
    chosen = [list(known.parameters.values())[number] for number in numbers]
    for parameter in known.parameters.values():
        parameter.grad = None
    for parameter, gradient in zip(chosen, gradients(2, chosen), strict=True):
        parameter.grad = gradient
    known.optimizers[0].step()
    assert all(map(torch.equal, [each.detach() for each in central.weights], [each.detach() for each in chosen]))


def test_gradients_and_what_optimizers_keep_arrive_where_the_weights_are() -> None:
    """The device without memory stands for those that this machine may not have."""
    known = prepared(OPTIMIZERS["Adam"])
    found = gradients(0, weights_of(known))
    set_gradients(known, found)
    known.optimizers[0].step()
    sent = states_of(known.optimizers[0], list(known.parameters.values()))
    sent = [{name: (value, name == "step") for name, (value, _) in state.items()} for state in sent]  # as on a device

    model = known.modules[0].to("meta")
    there = Prepared.of(model, [OPTIMIZERS["Adam"](model.parameters())])
    set_states(there.optimizers[0], list(there.parameters.values()), sent)
    for parameter in there.parameters.values():
        devices = {name: value.device.type for name, value in there.optimizers[0].state[parameter].items()}
        assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}

    central = CentralWeights(strategy(), there, range(len(there.parameters)))
    central.push(0, message(0, found, 0.1))
    assert central.version == 1


def test_parameters_that_were_not_used_are_left_alone_as_torch_leaves_them() -> None:
    known = prepared()
    central = CentralWeights(strategy(), known, (0, 1))
    before = central.weights[1].detach().clone()
    central.push(0, message(0, gradients(0, central.weights), 0.1, used=[True, False]))
    assert torch.equal(central.weights[1], before)
    assert not torch.equal(central.weights[0], weights_of(known)[0])


# -- several workers


def asynchronous(workers: Workers, how: ParameterServer, make: Make = OPTIMIZERS["SGD"]) -> AsynchronousServer:
    return AsynchronousServer(SyncContext(workers, prepared(make), PATIENCE_S, seed=0), how)


def push(worker: AsynchronousServer, found: Sequence[Tensor]) -> None:
    set_gradients(worker._prepared, found)
    worker.apply(worker._prepared.optimizers)


def test_whoever_calls_the_others_wakes_when_the_workers_part_and_leaves_nothing_open() -> None:
    parted = threading.Barrier(2)

    class Parting(Workers):
        endpoint: Any = None

        def attach(self, abort: Callable[[], None] | None) -> None:
            super().attach(abort)
            self.endpoint = getattr(abort, "__self__", None)

        def gather_json(self, value: Any) -> list[Any]:
            if self.endpoint is None:
                return super().gather_json(value)
            parted.wait(PATIENCE_S)
            self.abort()  # as the thread does that hears of a loss
            assert self.endpoint._is_closed
            raise WorkerLost("another one is gone")

    def work(workers: Workers) -> None:
        with pytest.raises(WorkerLost, match="another one is gone"):
            asynchronous(Parting(workers.generation, workers.transport), strategy())

    side_by_side(2, work)


def test_a_worker_waits_for_its_turn_no_longer_than_said_and_says_where_who_is() -> None:
    here = f"on host {platform.node()}"

    def work(workers: Workers) -> None:
        with closing(
            AsynchronousServer(SyncContext(workers, prepared(), 0.3, seed=0), strategy(max_staleness=0))
        ) as one:
            if workers.rank == 1:
                assert one.claim(0) == 0
            workers.barrier()
            if workers.rank == 0:
                words = f"rank 0 {here} waited for its turn in vain, which comes after rank 1 {here}. "
                with pytest.raises(NoProgress, match=re.escape(words)):
                    one.claim(1)
            workers.barrier()

    side_by_side(2, work)


def test_a_worker_that_only_serves_goes_along_step_by_step_and_waits_for_no_whole_round() -> None:
    taken: list[int] = []

    def work(workers: Workers) -> None:
        with closing(asynchronous(workers, strategy(servers=1))) as one:
            for step in range(5):
                if workers.rank == 0:
                    taken.append(step)
                assert one.claim(step) == (0 if workers.rank == 0 else None)
                assert step in taken
            workers.barrier()

    side_by_side(2, work)


@pytest.mark.parametrize(("number", "servers"), [(1, 0), (2, 0), (3, 1), (4, 2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_workers_that_take_turns_end_as_the_serial_run_does_with_the_optimizers_state(
    number: int, servers: int, name: str
) -> None:
    """The loss is such that the gradient is the weights' distance from what the step wants."""
    steps, rounds = 12, (5, 12)

    def wants(step: int, like: Sequence[Tensor]) -> list[Tensor]:
        return [weight - want for weight, want in zip(like, gradients(step, like), strict=True)]

    def work(workers: Workers) -> Prepared:
        computing = number - servers
        with closing(asynchronous(workers, strategy(servers=servers), OPTIMIZERS[name])) as one:
            for step in range(steps):
                if workers.rank == step % computing:
                    assert one.claim(step) == 0
                    push(one, wants(step, one.replica.weights))
                elif workers.rank >= computing:
                    assert one.claim(step) is None
                workers.barrier()
                if step + 1 in rounds:
                    one.synchronise(after_loss=False)()
            return one._prepared

    expected = prepared(OPTIMIZERS[name])
    for step in range(steps):
        set_gradients(expected, wants(step, weights_of(expected)))
        expected.optimizers[0].step()
    for found in side_by_side(number, work):
        assert all(map(torch.equal, weights_of(found), weights_of(expected)))
        for mine, theirs in zip(found.parameters.values(), expected.parameters.values(), strict=True):
            torch.testing.assert_close(
                dict(found.optimizers[0].state[mine]), dict(expected.optimizers[0].state[theirs]), rtol=0, atol=0
            )


CHANGES: dict[str, tuple[Make, Callable[[dict[str, Any], int], Any]]] = {
    "betas, as in OneCycleLR": (
        lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        lambda group, step: group.update(betas=(0.9 - 0.1 * step, 0.99)),
    ),
    "decay and a switch": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        lambda group, step: group.update(lr=0.01 * step, weight_decay=0.1 * step, nesterov=step > 1),
    ),
    "a rate that is a tensor": (
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05), foreach=False),
        lambda group, step: group["lr"].mul_(0.5),
    ),
    "numbers of numpy": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        lambda group, step: group.update(lr=np.float32(0.5), weight_decay=np.float64(0.1)),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_hyperparameter_the_script_changes_the_servers_go_by_it(name: str) -> None:
    make, change = CHANGES[name]

    def work(workers: Workers) -> list[Tensor]:
        with closing(asynchronous(workers, strategy(), make)) as one:
            for step in range(4):
                change(one._prepared.optimizers[0].param_groups[0], step)
                if workers.rank == step % 2:
                    one._pull()
                    push(one, gradients(step, one.replica.weights))
                workers.barrier()
            one.synchronise(after_loss=False)()
            return weights_of(one._prepared)

    expected = prepared(make)
    for step in range(4):
        change(expected.optimizers[0].param_groups[0], step)
        set_gradients(expected, gradients(step, weights_of(expected)))
        expected.optimizers[0].step()
    for found in side_by_side(2, work):
        assert all(map(torch.equal, found, weights_of(expected)))


@pytest.mark.parametrize("how", [strategy(), PairAveraging()], ids=str)
def test_schedulers_find_that_the_update_came_before_them_whoever_made_it(how: Strategy) -> None:
    def work(workers: Workers) -> float:
        context = SyncContext(workers, prepared(), PATIENCE_S, seed=0)
        one = AsynchronousServer(context, how) if isinstance(how, ParameterServer) else Pairs(context, PairAveraging())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(context.prepared.optimizers[0], 0.5)
        try:
            one.step_begins()
            workers.barrier()
            while workers.rank == 0 and one.claim(0) is not None:
                one.apply(context.prepared.optimizers)
            workers.barrier()
            assert one.claim(0) is None
            workers.barrier()
            scheduler.step()  # or it warns, and a warning fails a test
            return float(scheduler.get_last_lr()[0])
        finally:
            one.close()

    assert side_by_side(2, work) == [0.025, 0.025]


def test_what_cannot_be_told_in_a_message_is_left_as_the_server_has_it() -> None:
    optimizer = prepared().optimizers[0]
    optimizer.param_groups[0].update(names={"a"}, mixed=[1, {"a"}], many=torch.ones(2), nothing=None, pair=(1, 2.0))
    (told,) = hyperparameters_of(optimizer)
    assert {"names", "mixed", "many", "params"}.isdisjoint(told)
    assert json.loads(json.dumps(told)) == told
    twin = prepared().optimizers[0]
    twin.param_groups[0].update(pair=(0, 0), names="kept")
    set_hyperparameters(twin, [told])
    group = twin.param_groups[0]
    assert (group["pair"], group["names"], group["nothing"], group["lr"]) == ((1, 2.0), "kept", None, 0.05)


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize(("number", "servers"), [(2, 0), (4, 0), (4, 2)])
def test_no_gradient_is_staler_than_the_bound(number: int, servers: int, bound: int) -> None:
    def work(workers: Workers) -> dict[str, Any]:
        with closing(asynchronous(workers, strategy(servers=servers, max_staleness=bound))) as one:
            for step in range(30):
                while one.claim(step) is not None:
                    push(one, gradients(step, one.replica.weights))
            workers.barrier()
            return one.figures()

    found = side_by_side(number, work)
    assert sum(each["updates"] for each in found) == 30
    for each in found:
        assert len(each["staleness"]) in (0, 30)
        assert all(0 <= staleness <= bound for staleness in each["staleness"])
    assert any(each["staleness"] for each in found)


class Loss:
    """Three workers of which one is lost: what each had then.

    Attributes:
        expected: the weights that the others go on with: those of a server that lives, and else the newest copy.
    """

    def __init__(self, servers: int, lost: int) -> None:
        self.how, self.lost = strategy(servers=servers), lost
        self.all: dict[int, AsynchronousServer] = {}
        side_by_side(3, self._work)
        copies = self.all[self._newest].replica.weights
        self.expected = [weight.clone() for weight in copies]
        for rank, one in self.all.items():
            for number, weight in zip(one._central.numbers, one._central.weights, strict=True):
                if rank != lost:
                    assert not torch.equal(weight, copies[number])
                    self.expected[number] = weight.detach().clone()
        self.survivors = [one for rank, one in sorted(self.all.items()) if rank != lost]

    @property
    def _newest(self) -> int:
        return 1 if self.lost == 2 else 2

    def _work(self, workers: Workers) -> None:
        one = self.all[workers.rank] = asynchronous(workers, self.how)
        try:
            one._pull()
            workers.barrier()
            for step in range(4):
                if workers.rank == self._newest and step == 2:
                    one._pull()  # nobody else has this
                workers.barrier()
                if workers.rank == 0:
                    push(one, gradients(step, one.replica.weights))
                workers.barrier()
            if workers.rank == self.lost:
                workers.abort()
            with pytest.raises(WorkerLost):
                workers.barrier()
        finally:
            workers.abort()
            one.close()


def goes_on(
    workers: Workers, given: Prepared, known: AsynchronousServer | None, how: ParameterServer | None = None
) -> list[Tensor]:
    """What a worker pulls from those who serve after a loss."""
    with closing(AsynchronousServer(SyncContext(workers, given, PATIENCE_S, seed=0), how or strategy())) as one:
        if known is not None:
            one.follow(known)
        one.synchronise(after_loss=True)()
        one.resume()
        one._pull()
        workers.barrier()
        return one.replica.copies()


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("lost", [1, 2])
def test_what_a_lost_server_held_comes_from_the_newest_copy_and_all_else_from_its_server(
    servers: int, lost: int
) -> None:
    loss = Loss(servers, lost)

    def follow(workers: Workers) -> list[Tensor]:
        known = loss.survivors[workers.rank]
        return goes_on(workers, known._prepared, known, loss.how)

    for found in side_by_side(2, follow):
        assert all(map(torch.equal, found, loss.expected))


def test_whoever_was_given_anothers_state_serves_nothing_until_all_have_agreed() -> None:
    loss = Loss(servers=0, lost=2)
    expected = [weight.clone() for weight in loss.all[1].replica.weights]  # the newest copy of what two of them served
    served = loss.all[0]._central
    for number, weight in zip(served.numbers, served.weights, strict=True):
        expected[number] = weight.detach().clone()

    def follow(workers: Workers) -> list[Tensor]:
        known = loss.survivors[workers.rank]
        follows = workers.rank == 0
        return goes_on(workers, known._prepared if follows else prepared(), known if follows else None, loss.how)

    first, second = side_by_side(2, follow)
    assert all(map(torch.equal, first, second))
    for number in served.numbers:
        assert torch.equal(first[number], expected[number])
    for number in loss.all[1]._central.numbers:  # nobody is left who served them
        assert torch.equal(first[number], loss.all[0].replica.weights[number])


@pytest.mark.parametrize("after_loss", [True, False], ids=["after another loss", "in the round's end"])
def test_what_one_has_taken_of_a_server_that_is_lost_then_is_newer_than_older_copies(after_loss: bool) -> None:
    """Rank 0 has synchronised with the others when rank 2 is lost; rank 1 only has what it had pulled before."""
    all_of_them: dict[int, AsynchronousServer] = {}
    together = threading.Barrier(3)

    def lost(*found: Any) -> None:
        raise WorkerLost("rank 2 is gone")

    def break_off(workers: Workers) -> None:
        one = all_of_them[workers.rank] = asynchronous(workers, strategy())
        try:
            for step in range(4):
                if workers.rank == 1 and step == 2:
                    one._pull()
                workers.barrier()
                if workers.rank == 0:
                    push(one, gradients(step, one.replica.weights))
                workers.barrier()
            if workers.rank == 1:
                one._take = lost  # type: ignore[method-assign,assignment]
            else:
                workers.barrier = lost  # type: ignore[method-assign]
            one.follows = after_loss
            with suppress(WorkerLost):
                one.synchronise(after_loss=after_loss)()
                if after_loss:
                    one.resume()
            together.wait(PATIENCE_S)
        finally:
            one.close()

    side_by_side(3, break_off)
    expected = [weight.clone() for weight in all_of_them[0].replica.weights]

    def follow(workers: Workers) -> list[Tensor]:
        known = all_of_them[workers.rank]
        return goes_on(workers, known._prepared, known)

    for found in side_by_side(2, follow):
        assert all(map(torch.equal, found, expected))


def test_weights_that_the_script_changes_between_steps_are_refused() -> None:
    def work(workers: Workers) -> None:
        with closing(asynchronous(workers, strategy())) as one:
            one._pull()
            one.step_begins()
            with torch.no_grad():
                one.replica.weights[0].add_(1.0)
            with pytest.raises(ModelError, match=r"changed weights between two steps.*before run\.prepare"):
                one.step_begins()
            workers.barrier()

    side_by_side(2, work)


def test_many_threads_at_one_server_lose_no_update() -> None:
    known = prepared(lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    central = CentralWeights(strategy(), known, range(len(known.parameters)))
    before = [weight.detach().clone() for weight in central.weights]
    ones = pack([torch.ones_like(weight) for weight in before])
    begin = threading.Barrier(8)

    def work(worker: int) -> None:
        begin.wait(PATIENCE_S)
        for _ in range(50):
            version = central.pull(worker).values["version"]
            about = {"optimizers": [(0, [{"lr": 0.5}])], "version": version, "used": [True] * len(before)}
            central.push(worker, RpcMessage(about, ones))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert central.version == 400
    assert len(central.staleness()) == 400
    for weight, was in zip(unpack(central.pull(0).packed, before), before, strict=True):
        torch.testing.assert_close(weight, was - 200.0)
