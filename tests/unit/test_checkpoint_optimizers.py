"""Every optimizer and every schedule of torch goes on, after a checkpoint, as if nothing had happened."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler, swa_utils

from kept_states import captured
from same_trees import same
from unisono.checkpoint.checkpoint_store import CheckpointStore
from unisono.errors import CheckpointError
from unisono.train.model.prepared import Prepared
from unisono.train.state.model_state import restore_models, restore_optimizers

pytestmark = pytest.mark.unit

Parameters = list[nn.Parameter]


def matrices(parameters: Parameters) -> Parameters:
    return [parameter for parameter in parameters if parameter.ndim == 2]


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 0.01),
    "SGD momentum": lambda p: optim.SGD(p, 0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: optim.SGD(p, 0.01, momentum=0.9, fused=True),
    "Adam": optim.Adam,
    "Adam amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "Adam fused": lambda p: optim.Adam(p, fused=True, amsgrad=True),
    "Adam, rate a tensor": lambda p: optim.Adam(p, torch.tensor(1e-3)),
    "AdamW": lambda p: optim.AdamW(p, amsgrad=True),
    "AdamW groups": lambda p: optim.AdamW([{"params": p[:1], "lr": 0.01}, {"params": p[1:], "weight_decay": 0.0}]),
    "Adagrad": lambda p: optim.Adagrad(p, lr_decay=0.1),
    "Adagrad fused": lambda p: optim.Adagrad(p, fused=True),
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "Adamax": optim.Adamax,
    "ASGD": lambda p: optim.ASGD(p, 0.1, t0=2, lambd=0.01),
    "Muon": lambda p: optim.Muon(matrices(p)),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
}
REFUSED = {"SparseAdam", "LBFGS"}  # wants sparse gradients, which a run refuses


KINDS: dict[str, tuple[torch.dtype, torch.memory_format]] = {
    "float32": (torch.float32, torch.contiguous_format),
    "channels last": (torch.float32, torch.channels_last),
    "float64": (torch.float64, torch.contiguous_format),
    "bfloat16": (torch.bfloat16, torch.contiguous_format),
}
NOT_IN_TORCH = {
    ("SGD fused", "bfloat16"): "its first momentum depends on what was in memory before, and Unisono refuses it"
}
CASES = [(name, kind) for name in OPTIMIZERS for kind in KINDS if (name, kind) not in NOT_IN_TORCH]


def net(dtype: torch.dtype, layout: torch.memory_format) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(5 * 4, 3)).to(dtype)
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.contiguous(memory_format=layout)
    return model


def train(model: nn.Module, optimizer: Optimizer, batches: Iterable[Tensor]) -> None:
    for batch in batches:

        def loss(batch: Tensor = batch) -> Any:
            optimizer.zero_grad()
            value = model(batch).square().mean()
            value.backward()
            return value

        optimizer.step(loss)


@pytest.fixture(autouse=True)
def one_thread(torch_settings_restored: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    opened = CheckpointStore(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_optimizer_goes_on_to_the_same_bits(store: CheckpointStore, name: str, kind: str) -> None:
    make, (dtype, layout) = OPTIMIZERS[name], KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 3, 4, 4, generator=generator).to(dtype) for _ in range(7)]
    model, again = net(dtype, layout), net(dtype, layout)
    optimizer, later = make(list(model.parameters())), make(list(again.parameters()))
    train(model, optimizer, batches[:3])
    store.save(captured(Prepared.of(model, [optimizer])))
    train(model, optimizer, batches[3:])

    found, prepared = store.newest(), Prepared.of(again, [later])
    assert found is not None
    restore_models(prepared, found)
    restore_optimizers(prepared, found)
    train(again, later, batches[3:])
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(later.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("theirs", "ours"), [(optim.Adam, optim.AdamW), (optim.Adam, optim.SGD), (optim.SGD, optim.Adam)]
)
def test_the_state_of_an_optimizer_of_another_class_is_refused(theirs: type[Any], ours: type[Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer, other = theirs(model.parameters(), lr=0.1), ours(model.parameters(), lr=0.1)
    train(model, optimizer, [torch.ones(1, 2)])
    found = captured(Prepared.of(model, [optimizer]))

    with pytest.raises(CheckpointError, match=rf"the state of {theirs.__name__}, the script has {ours.__name__}:"):
        restore_optimizers(Prepared.of(model, [other]), found)
    assert not other.state


def test_no_optimizer_of_torch_is_left_out() -> None:
    names = {name for name, value in vars(optim).items() if isinstance(value, type) and issubclass(value, Optimizer)}
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    assert {type(make(parameters)).__name__ for make in OPTIMIZERS.values()} == names - REFUSED - {"Optimizer"}


class Halving:
    """A schedule as an object: torch keeps its attributes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return float(0.5**self.calls)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, Halving()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [4])]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 4)], [4]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, scale_fn=lambda cycle: 0.9**cycle),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "OneCycleLR in three phases": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=20, three_phase=True, anneal_strategy="linear"
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}


def advance(schedule: Any, optimizer: Optimizer, steps: int) -> list[dict[str, Any]]:
    """What the optimizer's settings are after each step."""
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        found.append({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
    return found


def scheduled(make: Callable[[Optimizer], Any]) -> tuple[Prepared, Optimizer, Any]:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Prepared.of(model, [optimizer]), optimizer, make(optimizer)


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_schedule_goes_on_to_the_same_rates(store: CheckpointStore, make: Callable[[Optimizer], Any]) -> None:
    prepared, optimizer, schedule = scheduled(make)
    advance(schedule, optimizer, 3)
    store.save(captured(prepared, schedule=schedule))
    undisturbed = advance(schedule, optimizer, 8)

    again, later, resumed = scheduled(make)
    found = store.newest()
    assert found is not None
    resumed.load_state_dict(found.state["registered"]["schedule"])
    restore_optimizers(again, found)
    assert same(advance(resumed, later, 8), undisturbed)
    assert same(resumed.state_dict(), schedule.state_dict())


def test_no_schedule_of_torch_is_left_out() -> None:
    known = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler)
    }
    tested = {type(make(scheduled(lr_scheduler.ConstantLR)[1])).__name__ for make in SCHEDULES.values()}
    assert tested == known - {"LRScheduler", "_LRScheduler"}


def test_an_average_of_the_weights_goes_on_to_the_same_bits(store: CheckpointStore) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    prepared = Prepared.of(model, [optim.SGD(model.parameters(), 0.1)])
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        average.update_parameters(model)
    store.save(captured(prepared, average=average))
    found = store.newest()
    assert found is not None
    assert same(found.state["registered"]["average"], average.state_dict())
