"""Local SGD, DiLoCo and model averaging against their formulas in float64; what becomes of buffers and optimizers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from side_by_side import PATIENCE_S, side_by_side
from unisono.errors import WorkerLost
from unisono.reduce.reducer import Averaging
from unisono.sync import DiLoCo, LocalSGD, Strategy
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import set_all
from unisono.train.strategies.local_rounds import LocalUpdates, OuterUpdates
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser
from unisono_lab import ModelAveraging
from unisono_lab.strategies.replicas import CentralAveraging

pytestmark = pytest.mark.unit

Make = Callable[[Any], Optimizer]
RATE = 0.1


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


class Net(nn.Module):
    """With a parameter without dimensions, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("nothing", torch.empty(0))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def prepared(make: Make = sgd) -> Prepared:
    model = Net()
    return Prepared.of(model, [make(model.parameters())])


def weights_of(known: Prepared) -> list[Tensor]:
    return [parameter.detach() for parameter in known.parameters.values()]


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(weight.shape, generator=generator) for weight in weights_of(prepared())]


def in_float64(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().double() for tensor in tensors]


def mean(vectors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(list(each)).mean(0) for each in zip(*vectors, strict=True)]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-5)


def set_gradients(known: Prepared, rank: int, step: int) -> None:
    for parameter, gradient in zip(known.parameters.values(), gradients(rank, step), strict=True):
        parameter.grad = gradient


KINDS: dict[type[Strategy], Callable[[SyncContext, Any], Synchroniser]] = {
    LocalSGD: LocalUpdates,
    DiLoCo: OuterUpdates,
    ModelAveraging: CentralAveraging,
}


def descend(replicas: Sequence[Sequence[Tensor]], step: int) -> None:
    for rank, replica in enumerate(replicas):
        for weight, gradient in zip(replica, gradients(rank, step), strict=True):
            weight.sub_(RATE * gradient.double())


def made(workers: Workers, known: Prepared, how: Strategy) -> Any:
    return KINDS[type(how)](SyncContext(workers, known, PATIENCE_S, seed=0), how)


def stepped(one: Synchroniser, known: Prepared, rank: int, step: int, *, ends_round: bool = False) -> None:
    one.step_begins()
    set_gradients(known, rank, step)
    one.apply(known.optimizers)
    one.step_ends(step, ends_round=ends_round)


def trained(number: int, how: Strategy, steps: int, rounds: Sequence[int]) -> list[list[list[Tensor]]]:
    """The replicas after each step, by worker."""

    def work(workers: Workers) -> list[list[Tensor]]:
        known, found = prepared(), []
        one = made(workers, known, how)
        for step in range(steps):
            stepped(one, known, workers.rank, step, ends_round=step in rounds)
            if step in rounds:
                one.synchronise(after_loss=False)()
            found.append(in_float64(weights_of(known)))
        one.close()
        return found

    return side_by_side(number, work)


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize(
    "how", [LocalSGD(every=3), DiLoCo(every=3, outer_rate=0.7, outer_momentum=0.9)], ids=["local-sgd", "diloco"]
)
def test_every_so_many_steps_and_at_a_rounds_end_all_take_the_mean_or_give_it_to_torchs_sgd_with_nesterov_momentum(
    how: LocalSGD | DiLoCo, number: int
) -> None:
    found = trained(number, how, 11, rounds=[5, 7])
    outer = [nn.Parameter(weight) for weight in in_float64(weights_of(prepared()))]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    replicas = [[each.detach().clone() for each in outer] for _ in range(number)]
    for step in range(11):
        descend(replicas, step)
        if step in (2, 5, 7, 8):
            average = mean(replicas)
            if isinstance(how, DiLoCo):
                for parameter, value in zip(outer, average, strict=True):
                    parameter.grad = parameter.detach() - value
                optimizer.step()
                average = in_float64(outer)
            replicas = [[each.clone() for each in average] for _ in replicas]
        for rank, replica in enumerate(replicas):
            assert_close(found[rank][step], replica)


def test_a_round_that_ends_again_without_a_step_in_between_moves_no_weight() -> None:
    def work(workers: Workers) -> list[list[Tensor]]:
        known = prepared()
        one = OuterUpdates(SyncContext(workers, known, PATIENCE_S, seed=0), DiLoCo(every=4))
        set_gradients(known, workers.rank, 0)
        one.apply(known.optimizers)
        one.step_ends(0, ends_round=True)
        found = []
        for _ in range(2):
            one.synchronise(after_loss=False)()
            found.append(one.replica.copies())
        return found

    for first, second in side_by_side(2, work):
        assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("how", [ModelAveraging(), ModelAveraging(alpha=0.2, momentum=0.7)], ids=str)
def test_model_averaging_draws_replicas_to_a_central_model_as_in_crossbow(how: ModelAveraging, number: int) -> None:
    found = trained(number, how, 12, rounds=[6, 11])
    alpha = how.alpha or 1 / number
    start = in_float64(weights_of(prepared()))
    replicas = [[each.clone() for each in start] for _ in range(number)]
    central, before = [each.clone() for each in start], [each.clone() for each in start]
    for step in range(12):
        apart = [[w - z for w, z in zip(replica, central, strict=True)] for replica in replicas]
        for rank, (replica, far) in enumerate(zip(replicas, apart, strict=True)):
            for weight, gradient, d in zip(replica, gradients(rank, step), far, strict=True):
                weight.sub_(RATE * gradient.double() + alpha * d)
        sums = [number * each for each in mean(apart)]
        after = [z + alpha * d + how.momentum * (z - was) for z, d, was in zip(central, sums, before, strict=True)]
        central, before = after, central
        if step in (6, 11):
            central = mean(replicas)
            replicas = [[each.clone() for each in central] for _ in replicas]
        for rank, replica in enumerate(replicas):
            assert_close(found[rank][step], replica)


def test_in_rounds_of_one_step_model_averaging_leaves_out_no_update() -> None:
    found = trained(2, ModelAveraging(), 3, rounds=[0, 1, 2])
    expected = in_float64(weights_of(prepared()))
    for step in range(3):
        for number, weight in enumerate(expected):
            weight.sub_(RATE * mean([gradients(rank, step) for rank in range(2)])[number].double())
    assert_close(found[0][-1], expected)


@pytest.mark.parametrize("how", [DiLoCo(), ModelAveraging()], ids=str)
def test_weights_that_the_script_has_loaded_between_rounds_are_those_that_training_goes_on_from(how: Strategy) -> None:
    def work(workers: Workers) -> list[Tensor]:
        known = prepared()
        one = made(workers, known, how)
        with torch.no_grad():
            for weight in weights_of(known):
                weight.fill_(7.0)
        one.round_begins()
        one.step_begins()
        one.step_ends(0, ends_round=True)
        one.synchronise(after_loss=False)()
        return weights_of(known)

    for found in side_by_side(2, work):
        assert all(bool((weight == 7.0).all()) for weight in found)


@pytest.mark.parametrize("how", [DiLoCo(every=2), ModelAveraging(momentum=0.9)], ids=str)
def test_what_goes_on_from_round_to_round_goes_on_in_the_next_generation(how: Strategy) -> None:
    def work(workers: Workers, *, again: bool) -> list[Tensor]:
        known = prepared()
        one = made(workers, known, how)
        for step in range(6):
            stepped(one, known, workers.rank, step, ends_round=step % 2 == 1)
            if step % 2 == 1:
                one.synchronise(after_loss=False)()
                if again:
                    state = {name: [each.clone() for each in kept] for name, kept in one.state_dict().items()}
                    one = made(workers, known, how)
                    one.load_state_dict(state)
        return weights_of(known)

    expected = side_by_side(2, lambda workers: work(workers, again=False))
    found = side_by_side(2, lambda workers: work(workers, again=True))
    assert all(map(torch.equal, found[0], expected[0]))


@pytest.mark.parametrize("how", [LocalSGD(every=4), DiLoCo(every=4), ModelAveraging(momentum=0.5)], ids=str)
def test_after_a_loss_the_others_go_on_from_one_model_with_what_they_have_done(how: Strategy) -> None:
    before: dict[int, tuple[Synchroniser, Prepared]] = {}

    def work(workers: Workers) -> None:
        known = prepared()
        one = made(workers, known, how)
        before[workers.rank] = one, known
        for step in range(2 if isinstance(how, ModelAveraging) else 3):
            stepped(one, known, workers.rank, step)
        workers.barrier()
        if workers.rank == 1:
            workers.abort()
        with pytest.raises(WorkerLost):
            workers.barrier()
        workers.abort()

    side_by_side(3, work)
    replicas = [in_float64(weights_of(before[rank][1])) for rank in (0, 2)]
    expected = mean(replicas)
    if isinstance(how, DiLoCo):
        start = in_float64(weights_of(prepared()))
        expected = [
            w - how.outer_rate * (1 + how.outer_momentum) * (w - average)
            for w, average in zip(start, expected, strict=True)
        ]

    def follow(workers: Workers) -> list[Tensor]:
        known, mine = before[(0, 2)[workers.rank]]
        one = made(workers, mine, how)
        one.follow(known)
        one.synchronise(after_loss=True)()
        return weights_of(mine)

    first, second = side_by_side(2, follow)
    assert_close(first, expected)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("how", [DiLoCo(every=2), ModelAveraging(momentum=0.5)], ids=str)
def test_whoever_was_given_anothers_state_in_the_middle_of_a_round_has_what_all_have_afterwards(how: Strategy) -> None:
    kept: dict[str, list[Tensor]] = {}

    def work(workers: Workers) -> tuple[list[Tensor], dict[str, Any]]:
        known = prepared()
        one = made(workers, known, how)
        for step in range(5):
            stepped(one, known, workers.rank, step)
        if workers.rank == 0:
            kept.update({name: [each.clone() for each in values] for name, values in one.state_dict().items()})
        again = made(workers, known, how)
        if workers.rank != 2:
            again.follow(one)
        again.synchronise(after_loss=True)()
        return again.replica.copies(), again.state_dict()

    found = side_by_side(3, work)
    for weights, state in found:
        assert all(map(torch.equal, weights, found[0][0]))
        for name, values in state.items():
            assert all(map(torch.equal, values, found[0][1][name]))
    if isinstance(how, ModelAveraging):  # which has not moved it since
        assert_close(found[2][1]["previous"], in_float64(kept["previous"]))


# -- buffers and optimizers


def synchronised(number: int, make: Make, updates: Sequence[int]) -> list[Prepared]:
    """Workers that made so many updates each, and synchronised."""

    def work(workers: Workers) -> Prepared:
        known = prepared(make)
        one = LocalUpdates(SyncContext(workers, known, PATIENCE_S, seed=0), LocalSGD())
        for step in range(updates[workers.rank]):
            set_gradients(known, workers.rank, step)
            one.apply(known.optimizers)
        norm = known.modules[0].norm
        norm.running_mean.fill_(float(workers.rank))  # type: ignore[operator, union-attr]
        norm.running_var.fill_(float(workers.rank**2))  # type: ignore[operator, union-attr]
        norm.num_batches_tracked.fill_(7 + workers.rank)  # type: ignore[operator, union-attr]
        one.synchronise(after_loss=False)()
        return known

    return side_by_side(number, work)


def test_statistics_of_batch_norm_become_the_mean_and_counts_those_of_the_first_worker() -> None:
    for known in synchronised(3, sgd, [1, 1, 1]):
        norm: Any = known.modules[0].norm
        torch.testing.assert_close(norm.running_mean, torch.full((4,), 1.0))
        torch.testing.assert_close(norm.running_var, torch.full((4,), 5 / 3))
        assert norm.num_batches_tracked == 7
        assert norm.num_batches_tracked.dtype == torch.int64


def averaged(weights: Sequence[float]) -> list[float]:
    """The statistics, counts and infinities of workers that count so much."""

    def work(workers: Workers) -> list[float]:
        known = prepared()
        norm: Any = known.modules[0].norm
        norm.running_mean.fill_(float(workers.rank))
        norm.running_var.fill_(1.0 if weights[workers.rank] else torch.inf)
        norm.num_batches_tracked.fill_(7 + workers.rank)
        replica = LocalUpdates(SyncContext(workers, known, PATIENCE_S, seed=0), LocalSGD()).replica
        set_all(replica.average_buffers(weights[workers.rank]))
        return [float(norm.running_mean[0]), float(norm.running_var[0]), int(norm.num_batches_tracked)]

    found = side_by_side(len(weights), work)
    assert all(one == found[0] for one in found)
    return list(found[0])


def test_workers_that_computed_nothing_have_no_part_in_the_statistics() -> None:
    assert averaged([0.0, 1.0, 3.0]) == [1.75, 1.0, 9]
    assert averaged([0.0, 0.0, 0.0])[::2] == [1.0, 7]


def alone(make: Make, rank: int, updates: int) -> list[dict[str, Any]]:
    """What a worker's optimizer keeps, if nobody synchronises with it."""
    known = prepared(make)
    for step in range(updates):
        set_gradients(known, rank, step)
        known.optimizers[0].step()
    return [dict(known.optimizers[0].state[parameter]) for parameter in known.parameters.values()]


def test_where_a_worker_has_made_no_update_all_take_what_the_one_with_the_most_has() -> None:
    def momentum(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)

    expected = alone(momentum, 1, 2)
    for known in synchronised(3, momentum, [0, 2, 1]):
        for kept, parameter in zip(expected, known.parameters.values(), strict=True):
            assert torch.equal(known.optimizers[0].state[parameter]["momentum_buffer"], kept["momentum_buffer"])


COUNTS = {"step", "mu_product", "eta", "mu"}
STATEFUL: dict[str, Make] = {
    "Adam": torch.optim.Adam,
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1, t0=2, lambd=0.01, alpha=0.5),
    "RAdam": torch.optim.RAdam,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_whatever_the_optimizer_moments_become_the_mean_and_all_counts_those_of_the_worker_with_most_updates(
    name: str,
) -> None:
    updates = [2, 5, 3]
    found = synchronised(3, STATEFUL[name], updates)
    each = [alone(STATEFUL[name], rank, times) for rank, times in enumerate(updates)]
    for known in found:
        for number, parameter in enumerate(known.parameters.values()):
            for kept, value in known.optimizers[0].state[parameter].items():
                alike = [one[number][kept] for one in each]
                expected = alike[1] if kept in COUNTS else torch.stack([one.double() for one in alike]).mean(0)
                torch.testing.assert_close(value.double(), expected.double(), rtol=1e-6, atol=1e-7)


class Coded(Optimizer):
    """Keeps its moments as codes with a scale, and counts in plain numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": RATE})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, size = self.state[parameter], float(parameter.grad.abs().max())
            codes = (parameter.grad / size * 100).round().to(torch.int8)
            state.update(step=state.get("step", 0) + 1, codes=codes, scale=torch.full((2,), size), nothing=None)


def test_codes_have_no_mean_and_come_from_one_worker_with_their_scales() -> None:
    updates = [2, 5, 3]
    expected = alone(Coded, 1, 5)
    for known in synchronised(3, Coded, updates):
        for kept, parameter in zip(expected, known.parameters.values(), strict=True):
            if parameter.numel() > 1:
                torch.testing.assert_close(dict(known.optimizers[0].state[parameter]), kept, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_of_many_tensors_of_all_shapes_are_the_same_on_all_workers(dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(), (3,), (0,), (7, 5), (1,), (300, 200)]

    def tensors(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    def work(workers: Workers) -> list[list[Tensor]]:
        averaging = Averaging(workers.transport)
        assert averaging.mean([]) == []
        found = [[each.clone() for each in averaging.mean(tensors(workers.rank), by)] for by in (None, 1.0)]
        found.append([each.clone() for each in averaging.mean(tensors(workers.rank)[:2])])
        return found

    everybody = side_by_side(3, work)
    exact = [
        torch.stack([each.double() for each in group]).sum(0) for group in zip(*map(tensors, range(3)), strict=True)
    ]
    for means, sums, few in everybody:
        assert all(map(torch.equal, means, everybody[0][0]))
        for mine, summed, total in zip(means, sums, exact, strict=True):
            assert mine.dtype == dtype
            loose = 4 * torch.finfo(dtype).eps * 4
            torch.testing.assert_close(mine.double(), total / 3, rtol=loose, atol=loose)
            torch.testing.assert_close(summed.double(), total, rtol=loose, atol=loose)
        assert all(map(torch.equal, few, means[:2]))


@pytest.mark.parametrize("how", [LocalSGD(every=2), DiLoCo(every=2), ModelAveraging()], ids=str)
def test_a_round_in_whose_last_collective_a_worker_is_lost_has_changed_nothing(how: Strategy) -> None:
    def lost() -> None:
        raise WorkerLost("in the last collective of the round")

    def work(workers: Workers) -> tuple[list[Tensor], list[Tensor]]:
        known = prepared()
        one = made(workers, known, how)
        stepped(one, known, workers.rank, 0, ends_round=True)
        before = one.replica.copies()
        one.replica.average_states = lost
        with pytest.raises(WorkerLost):
            one.synchronise(after_loss=False)
        return before, one.replica.copies()

    for before, after in side_by_side(2, work):
        assert all(map(torch.equal, before, after))
