"""Pair averaging keeps the mean of all replicas, whoever dies in the middle of an exchange."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from side_by_side import PATIENCE_S, side_by_side
from unisono.errors import ModelError, WorkerLost
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.strategies.synchroniser import SyncContext
from unisono_lab import PairAveraging
from unisono_lab.strategies.replicas import Pairs
from unisono_lab.strategies.rpc_message import RpcMessage

pytestmark = pytest.mark.unit

ASKS, ANSWERS, THIRD = 0, 1, 2


class Death(Exception):
    """This worker is gone."""


def prepared(rank: int, rate: float = 0.0) -> Prepared:
    """A model whose weights are the rank's own."""
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 10**rank)
    return Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)])


def pairs_of(workers: Workers, rate: float = 0.0) -> Pairs:
    return Pairs(SyncContext(workers, prepared(workers.rank, rate), PATIENCE_S, seed=0), PairAveraging())


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """In float64, as a vector."""
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def mean(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).mean(0)


def assert_same_mean(found: Tensor, expected: Tensor, size: float) -> None:
    """Equal to rounding, for replicas whose weights are of that size."""
    torch.testing.assert_close(found, expected, rtol=0, atol=16 * size * torch.finfo(torch.float32).eps)


def updated(pairs: Pairs, gradient: float = 0.0) -> None:
    """Exchange and update."""
    optimizer = pairs._context.prepared.optimizers[0]
    for parameter in pairs._context.prepared.parameters.values():
        parameter.grad = torch.full_like(parameter, gradient)
    pairs.apply([optimizer])


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_many_exchanges_at_once_keep_the_mean_and_bring_replicas_together(number: int) -> None:
    def work(workers: Workers) -> tuple[Tensor, Tensor]:
        pairs = pairs_of(workers)
        before = flat(prepared(workers.rank).parameters.values())
        try:
            for _ in range(10):
                for _ in range(4):
                    updated(pairs)
                workers.barrier()  # or one may be through with all of them before another begins
            return before, flat(pairs._live)
        finally:
            pairs.close()

    found = side_by_side(number, work)
    before, after = [[each[time] for each in found] for time in (0, 1)]
    size = float(torch.stack(before).abs().max())
    assert_same_mean(mean(after), mean(before), 4 * size)
    spread = [float(torch.stack(replicas).std(0).max()) for replicas in (before, after)]
    assert spread[1] < 1e-3 * spread[0]


def test_an_exchange_leaves_the_same_bits_on_both_sides_and_is_counted_on_both() -> None:
    def work(workers: Workers) -> tuple[Tensor, dict[str, int], Tensor]:
        pairs = pairs_of(workers)
        before = flat(prepared(workers.rank).parameters.values())
        try:
            if workers.rank == ASKS:
                pairs._exchange(ANSWERS)
            workers.barrier()
            return flat(pairs._live), pairs.figures(), before
        finally:
            pairs.close()

    (mine, counted, a), (theirs, counted_there, b) = side_by_side(2, work)
    assert torch.equal(mine, theirs)
    assert torch.equal(mine, ((a.float() + b.float()) / 2).double())
    assert counted == counted_there == {"updates": 0, "exchanges": 1}


def test_the_gradient_that_was_taken_before_is_applied_to_the_mean_by_the_workers_own_optimizer() -> None:
    def work(workers: Workers) -> Tensor:
        pairs = pairs_of(workers, rate=0.1)
        try:
            if workers.rank == ASKS:
                for step in range(3):
                    updated(pairs, gradient=1.0 + step)
            workers.barrier()
            return flat(pairs._live)
        finally:
            pairs.close()

    mine, theirs = side_by_side(2, work)
    a, b = (flat(prepared(rank).parameters.values()) for rank in range(2))
    velocity = torch.zeros_like(a)
    for step in range(3):
        a = b = (a + b) / 2
        velocity = 0.9 * velocity + 1.0 + step
        a = a - 0.1 * velocity
    torch.testing.assert_close((mine, theirs), (a, b), rtol=1e-5, atol=1e-5)


def test_weights_that_the_script_changes_between_steps_are_refused() -> None:
    def work(workers: Workers) -> None:
        pairs = pairs_of(workers)
        try:
            pairs.synchronise(after_loss=False)()
            pairs.step_begins()
            with torch.no_grad():
                pairs.replica.weights[0].add_(1.0)
            with pytest.raises(ModelError, match=r"changed weights between two steps.*before run\.prepare"):
                pairs.step_begins()
            workers.barrier()
        finally:
            pairs.close()

    side_by_side(2, work)


def test_nobody_is_asked_for_a_replica_of_before_when_all_have_come_together() -> None:
    exchanged = threading.Event()

    def work(workers: Workers) -> tuple[Tensor, Tensor]:
        pairs = pairs_of(workers)
        try:
            together = pairs.replica.average_states

            def dawdling() -> Callable[[], None]:
                found = together()
                if workers.rank == ANSWERS:  # it is not back yet, and the other one goes on
                    assert exchanged.wait(PATIENCE_S)
                return found

            pairs.replica.average_states = dawdling  # type: ignore[method-assign]
            before = flat(pairs._live)
            pairs.synchronise(after_loss=False)()
            if workers.rank == ASKS:
                with torch.no_grad():
                    pairs._live[0].add_(8.0)  # an update
                pairs._exchange(ANSWERS)
                exchanged.set()
            workers.barrier()
            return before, flat(pairs._live)
        finally:
            pairs.close()

    found = side_by_side(2, work)
    expected = mean([before for before, _ in found])
    expected[:35] += 4.0
    assert_same_mean(mean([after for _, after in found]), expected, float(expected.abs().max()))


# -- losses


class Scene:
    """Workers of which one dies in the middle of the exchange between the first two.

    Attributes:
        dies: the rank of the one that dies.
        when: the moment, see :data:`MOMENTS`.
    """

    def __init__(self, number: int, dies: int, when: str) -> None:
        self.number, self.dies, self.when = number, dies, when
        self.all: dict[int, Pairs] = {}
        self.before: dict[int, Tensor] = {}
        self.between: Callable[[], None] = lambda: None
        self.hung_up = {rank: threading.Event() for rank in range(number)}

    def play(self) -> list[Pairs]:
        """Returns the survivors."""
        side_by_side(self.number, self._work)
        return [self.all[rank] for rank in range(self.number) if rank != self.dies]

    def expected(self) -> Tensor:
        """The mean of the survivors' replicas before the exchange."""
        return mean([self.before[rank] for rank in range(self.number) if rank != self.dies])

    def _work(self, workers: Workers) -> None:
        pairs = self.all[workers.rank] = pairs_of(workers)
        self._watch(pairs)
        if workers.rank % 2 == 0:  # whole ones before
            pairs._exchange(ANSWERS)
        workers.barrier()
        with torch.no_grad():  # an update
            for live in pairs._live:
                live.add_(10.0 * workers.rank + 3.0)
        self.before[workers.rank] = flat(pairs._live)
        try:
            workers.barrier()  # some may still be in it when the first has begun
            if workers.rank == ASKS:
                self._exchange_with_death(pairs)
            workers.barrier()
        except (WorkerLost, Death):
            workers.abort()
        else:
            pytest.fail(f"rank {workers.rank} noticed nothing")
        finally:
            pairs.close()

    def _watch(self, pairs: Pairs) -> None:
        endpoint = pairs._endpoint
        assert endpoint is not None
        ends, rank = endpoint._ends, pairs.rank

        def hung_up() -> None:
            ends()
            self.hung_up[rank].set()

        endpoint._ends = hung_up

    def _exchange_with_death(self, asking: Pairs) -> None:
        """Everything happens as it is written in :data:`MOMENTS`, and in this order."""
        answering = self.all[ANSWERS]
        answered, ask_one = answering._answer_worker, asking._request_from

        def answer(rank: int, message: RpcMessage) -> RpcMessage:
            said = message.values["ask"]
            self._moment("asked" if said == "average" else "confirming", ANSWERS)
            found = answered(rank, message)
            if rank == ASKS:
                self._moment("answering" if said == "average" else "confirmed", ANSWERS)
            return found

        def ask(rank: int, message: RpcMessage) -> RpcMessage:
            if message.values["ask"] == "averaged":
                self._moment("answered", ASKS)
            return ask_one(rank, message)

        answering._answer_worker, asking._request_from = answer, ask  # type: ignore[method-assign]
        asking._exchange(ANSWERS)

    def _moment(self, name: str, rank: int) -> None:
        if name != self.when:
            return
        self.between()
        dying = self.all[self.dies]
        dying.workers.abort()  # its connections are closed
        assert self.hung_up[rank].wait(PATIENCE_S)
        if rank == self.dies:
            raise WorkerLost("it is gone") if rank == ANSWERS else Death


MOMENTS = {
    "asked": "the question has arrived",
    "answering": "the one that was asked has the mean, and has not sent it",
    "answered": "both have the mean",
    "confirming": "the confirmation has arrived, and was not read yet",
    "confirmed": "the confirmation was read, and the answer to it was not sent",
}
CASES = [
    (number, dies, when)
    for number in (2, 4)
    for dies in range(min(number, 3))
    for when in MOMENTS
    if dies != ASKS or not when.startswith("confirm")  # or the exchange is whole on both sides
]


def synchronised(survivors: Sequence[Pairs], work: Callable[[Pairs], None] = lambda pairs: None) -> list[Pairs]:
    """The survivors synchronise in the next generation."""

    def follow(workers: Workers) -> Pairs:
        before = survivors[workers.rank]
        pairs = Pairs(SyncContext(workers, before._context.prepared, PATIENCE_S, seed=0), PairAveraging())
        try:
            pairs.follow(before)
            work(pairs)
            pairs.synchronise(after_loss=True)()
        except Death:
            workers.abort()
        finally:
            pairs.close()
        return pairs

    found: list[Pairs] = side_by_side(len(survivors), follow)
    for one in found:
        assert torch.equal(flat(one._live), flat(one.replica.weights))
        assert torch.equal(flat(one._live), flat(found[0]._live))
    return found


@pytest.mark.parametrize(("number", "dies", "when"), CASES)
def test_the_survivors_come_together_at_the_mean_that_they_had_before_a_broken_exchange(
    number: int, dies: int, when: str
) -> None:
    scene = Scene(number, dies, when)
    survivors = scene.play()
    expected = scene.expected()
    largest = max(float(one.abs().max()) for one in scene.before.values())
    assert_same_mean(mean([flat(one._live) for one in synchronised(survivors)]), expected, largest)


@pytest.mark.parametrize("when", ["confirming", "confirmed"])
def test_a_whole_exchange_stays_when_the_one_who_asked_dies_after_it(when: str) -> None:
    scene = Scene(2, ASKS, when)
    (survivor,) = scene.play()
    expected = mean(list(scene.before.values()))
    (found,) = synchronised([survivor])
    assert_same_mean(flat(found._live), expected, float(expected.abs().max()))


@pytest.mark.parametrize("dies", [ASKS, ANSWERS])
def test_what_happens_between_a_broken_exchange_and_the_death_stays(dies: int) -> None:
    scene = Scene(4, dies, "answered")

    def between() -> None:
        scene.all[THIRD]._exchange(ANSWERS if dies == ASKS else 3)
        with torch.no_grad():
            scene.all[3]._live[0].add_(3.0)

    scene.between = between
    survivors = scene.play()
    expected = scene.expected()
    expected[:35] += 1.0
    largest = max(float(one.abs().max()) for one in scene.before.values())
    assert_same_mean(mean([flat(one._live) for one in synchronised(survivors)]), expected, largest)


@pytest.mark.parametrize("misses", [0, 1])
@pytest.mark.parametrize("when", MOMENTS)
def test_another_loss_while_they_come_together_does_not_change_what_becomes_of_an_exchange(
    when: str, misses: int
) -> None:
    scene = Scene(3, THIRD, when)
    survivors = scene.play()

    def fail(pairs: Pairs) -> None:
        gather = pairs.workers.gather_json

        def gathered(value: Any) -> list[Any]:
            found = gather(value)
            if isinstance(value, list):  # which exchanges there are
                raise Death
            return found

        if pairs.rank == misses:
            pairs.workers.gather_json = gathered  # type: ignore[method-assign]

    try:
        synchronised(survivors, fail)
    except WorkerLost:
        pass
    else:
        pytest.fail("the other one noticed nothing")
    largest = max(float(one.abs().max()) for one in scene.before.values())
    assert_same_mean(mean([flat(one._live) for one in synchronised(survivors)]), scene.expected(), largest)
