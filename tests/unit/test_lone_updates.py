"""A script that updates weights by itself, where other workers do so, too."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import UnisonoWarning
from unisono.train.model.prepared import Prepared
from unisono.train.model.update import may_change_gradients
from unisono.train.record.notices import ALL_STEPS, AllSteps, LoneUpdates

pytestmark = pytest.mark.unit

Watch = Callable[..., LoneUpdates]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """What watches the updates of one of some workers."""
    opened: list[LoneUpdates] = []

    def watching(world_size: int = 2, *, is_main: bool = True, joins: bool = False) -> LoneUpdates:
        workers: Any = SimpleNamespace(world_size=world_size)
        membership: Any = SimpleNamespace(is_main=is_main, joins=joins, workers=workers)
        opened.append(LoneUpdates(membership))
        return opened[-1]

    yield watching
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnisonoWarning)
        for one in opened:
            one.close()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def begin_a_loop(watch: LoneUpdates) -> None:
    nothing: Any = None
    watch.loop_begins(0, nothing, nothing)


def test_the_first_update_of_a_prepared_optimizer_by_the_script_is_told_once(watch: Watch) -> None:
    watched, (model, optimizer) = watch(3), model_and_optimizer()
    watched.prepared(Prepared.of(model, [optimizer]), 0)
    with pytest.warns(UnisonoWarning, match=r"SGD.step\(\) .* 3 workers .* train apart.* step.run\(loss_fn\)"):
        update(model, optimizer)
    update(model, optimizer)
    watched.close()


def test_a_run_that_ends_without_prepare_says_that_its_workers_have_trained_apart(watch: Watch) -> None:
    watched, pair = watch(), model_and_optimizer()
    update(*pair)
    with pytest.warns(UnisonoWarning, match=r"ends without run.prepare, and SGD.step\(\) .* 2 workers .* train apart"):
        watched.close()


@pytest.mark.parametrize("where", [{"world_size": 1}, {"is_main": False}, {"world_size": 0, "joins": True}])
def test_one_worker_and_others_than_the_main_one_say_nothing(where: Any, watch: Watch) -> None:
    for is_prepared in (True, False):
        watched, (model, optimizer) = watch(**where), model_and_optimizer()
        if is_prepared:
            watched.prepared(Prepared.of(model, [optimizer]), 0)
        update(model, optimizer)
        watched.close()


def test_optimizers_that_the_run_does_not_train_are_the_scripts_own_and_without_gradients_is_no_update(
    watch: Watch,
) -> None:
    watched, (model, optimizer) = watch(), model_and_optimizer()
    update(*model_and_optimizer())
    watched.prepared(Prepared.of(model, [optimizer]), 0)
    update(*model_and_optimizer())
    optimizer.step()
    watched.close()


def test_nothing_is_watched_once_a_loops_first_step_has_ended(watch: Watch) -> None:
    before = ALL_STEPS.number
    watched, (model, optimizer) = watch(), model_and_optimizer()
    watched.prepared(Prepared.of(model, [optimizer]), 0)
    assert ALL_STEPS.number == before + 1
    begin_a_loop(watched)
    nothing: Any = None
    watched.step_ends(nothing, 1)
    assert ALL_STEPS.number == before
    update(model, optimizer)
    watched.close()


def test_watches_come_and_go_while_another_thread_updates() -> None:
    steps = AllSteps()
    model, optimizer = model_and_optimizer()
    reports: list[Any] = []

    def come_and_go(_: object) -> None:
        late: Any = lambda _: None  # noqa: E731
        steps.add(late)
        steps.remove(late)

    steps.add(come_and_go)
    steps.add(reports.append)
    update(model, optimizer)
    assert reports == [optimizer]
    steps.remove(come_and_go)
    steps.remove(reports.append)
    assert steps.number == 0


def test_whoever_watches_changes_no_gradient(watch: Watch) -> None:
    _, optimizer = model_and_optimizer()
    watch()
    assert not may_change_gradients(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert may_change_gradients(optimizer)
    handle.remove()


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize("is_by_hand", [True, False])
def test_an_update_by_hand_behind_that_of_step_run_is_told_at_the_scripts_line(
    tmp_path: Path, is_by_hand: bool
) -> None:
    model, optimizer = model_and_optimizer()
    with warnings.catch_warnings(record=True) as seen, closing(unisono.init(batch_size=4, run_dir=tmp_path)) as run:
        warnings.simplefilter("always")
        run.prepare(model, optimizer)
        for step in run.steps(TensorDataset(torch.ones(12, 2)), epochs=2):
            step.run(loss_of, update=optimizer.step if step.number % 2 else None)
            if is_by_hand:
                optimizer.step()
        assert ALL_STEPS.number == 0
    told = [(each.filename, str(each.message)) for each in seen if "SGD.step() is called" in str(each.message)]
    assert [name for name, _ in told] == [__file__] * is_by_hand
    assert all("step.run has made the optimizer's update already: leave it out" in words for _, words in told)
