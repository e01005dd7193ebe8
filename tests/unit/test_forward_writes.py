"""Weights that a forward or backward pass changes would depend on the number of workers."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.thread_crew import Trade, train
from unisono.errors import ModelError
from unisono.job import Job
from unisono.train.run import Run
from unisono.train.step.weights_watch import EVERY, FIRST, ForwardWrites

pytestmark = pytest.mark.unit

SHARDS = 5


def in_place(slow: nn.Parameter, fast: Tensor) -> None:
    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


def replaced(slow: nn.Parameter, fast: Tensor) -> None:
    slow.data = slow.data * 0.9 + fast.data * 0.1


@torch.no_grad()
def counted(slow: nn.Parameter, fast: Tensor) -> None:
    slow.lerp_(fast, 0.1)


class Momentum(nn.Module):
    """A network and its slowly moving average, which is a target."""

    def __init__(self, moves: Callable[[nn.Parameter, Tensor], None]) -> None:
        super().__init__()
        self.fast = nn.Linear(4, 3)
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        self.moves = moves

    def move(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            self.moves(slow, fast)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.fast(x), self.slow(x) + 1)


class MovesInForward(Momentum):
    """As published implementations write it."""

    def forward(self, x: Tensor) -> Tensor:
        self.move()
        return super().forward(x)


def trained(model: Callable[[], nn.Module], after: Callable[[Any], None] = lambda model: None) -> Callable[[Run], str]:
    def script(run: Run) -> str:
        with torch.random.fork_rng():
            built = model()
        run.prepare(built, torch.optim.SGD([one for one in built.parameters() if one.requires_grad], lr=0.1))
        samples = torch.linspace(-1, 1, 80).view(20, 4).sin()
        for step in run.steps(TensorDataset(samples), epochs=3):
            step.run(lambda model, batch: model(batch[0]))
            after(built)
        return run.finish()

    return script


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Alike on each thread."""
    state = make().state_dict()

    def build() -> nn.Module:
        built = make()
        built.load_state_dict(state)
        return built

    return build


def trade(workers: int, folder: Path) -> Trade:
    return Trade(Job.create(batch_size=10, shards=SHARDS), workers, folder)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("moves", [in_place, replaced, counted])
def test_a_forward_pass_that_changes_weights_is_refused_by_name(
    tmp_path: Path, workers: int, moves: Callable[[nn.Parameter, Tensor], None]
) -> None:
    with pytest.raises(ModelError, match=r"step \d, rank \d: .*changed slow.weight.* after step.run"):
        train(trade(workers, tmp_path), trained(seeded(lambda: MovesInForward(moves))))


@pytest.mark.parametrize("moves", [in_place, replaced, counted])
def test_the_same_change_after_the_step_has_the_same_bits_on_any_number_of_workers(
    tmp_path: Path, moves: Callable[[nn.Parameter, Tensor], None]
) -> None:
    model = seeded(lambda: Momentum(moves))
    digests = {
        digest
        for workers in (1, 2, 3, 5)
        for digest in train(trade(workers, tmp_path / str(workers)), trained(model, lambda built: built.move()))
    }
    assert len(digests) == 1


class Renormalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.last = nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        predicted: Tensor = self.last(self.embedded((x[:, 0] * 10 + 10).long()))
        return predicted.square().mean()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_embedding_that_renormalises_the_rows_it_reads_is_refused(tmp_path: Path, workers: int) -> None:
    with pytest.raises(ModelError, match="changed embedded.weight"):
        train(trade(workers, tmp_path), trained(seeded(Renormalised)))


def test_an_update_in_the_backward_pass_is_refused(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))

        def update(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)

        for parameter in made.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return made

    def script(run: Run) -> None:
        made = model()
        run.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
        for step in run.steps(TensorDataset(torch.ones(20, 4)), epochs=1):
            step.run(lambda model, batch: model(batch[0]).square().mean())

    with pytest.raises(ModelError, match=r"changed 0.weight and 1 more"):
        train(trade(1, tmp_path), script)


# -- what is compared when


def called(found: ForwardWrites, change: Callable[[], object]) -> None:
    attempt = cast("Any", SimpleNamespace(call=SimpleNamespace(step=0)))
    found.attempt(attempt)
    change()
    found.computed(attempt)


def test_a_write_of_the_same_bits_is_none() -> None:
    weight = torch.ones(5)
    found = ForwardWrites({"weight": weight}, 0)
    for _ in range(FIRST + 2):
        called(found, lambda: weight.clamp_(-2, 2))


def test_a_flipped_bit_is_left_to_those_who_look_for_it() -> None:
    weight = torch.ones(5)
    called(ForwardWrites({"weight": weight}, 0), lambda: weight.data.view(torch.int32)[3].bitwise_xor_(1 << 20))


def test_a_counted_write_after_the_first_calls_is_found_in_the_call_after_it() -> None:
    weight = torch.ones(5)
    found = ForwardWrites({"weight": weight}, 0)
    for _ in range(FIRST + 1):
        called(found, lambda: None)
    called(found, lambda: weight.mul_(1.1))
    with pytest.raises(ModelError, match="changed weight. Each"):
        called(found, lambda: weight.mul_(1.1))


def test_an_uncounted_write_that_begins_late_is_found_after_a_while() -> None:
    weight = torch.ones(5)
    found = ForwardWrites({"weight": weight}, 0)
    for _ in range(FIRST):
        called(found, lambda: None)
    with pytest.raises(ModelError, match="changed weight"):
        for _ in range(EVERY):
            called(found, lambda: weight.data.mul_(1.1))
