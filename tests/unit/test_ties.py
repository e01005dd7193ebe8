"""Weights that several modules have in common stay one, or are refused; on one device as on several."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import unisono
from unisono.errors import ModelError
from unisono.train.model.slices import materialise, require_options
from unisono.train.model.stages import StagePlaces, Stages
from unisono.train.model.staging import Staging
from unisono.train.model.ties import Ties

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("torch_settings_restored")]

CPU = torch.device("cpu")


class Tied(nn.Sequential):
    """Four layers, the two in the middle with one weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        self[2].weight = self[1].weight


def test_a_tied_model_of_the_meta_device_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    wanted = Tied()
    with torch.device("meta"):
        model = Tied()

    torch.manual_seed(0)
    materialise([model], CPU)

    assert model[2].weight is model[1].weight
    assert len(list(model.parameters())) == 7
    assert unisono.digest(model) == unisono.digest(wanted)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("begins_on", ["meta", "cpu"])
def test_a_tied_model_in_stages_stays_tied_on_each_device(rank: int, begins_on: str) -> None:
    with torch.device(begins_on):
        model = Tied()

    Staging(model, Stages.of(model, ["1"]), StagePlaces.of("1f1b", 2, 2, rank), lambda value, _: value, CPU)

    assert model[2].weight is model[1].weight
    assert [each.is_meta for each in model.parameters()] == [rank == 1] * 2 + [rank == 0] * 5


def test_modules_that_leave_themselves_out_of_checkpoints_lie_in_stages() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(checkpoint_wrapper(block), nn.Linear(4, 3))

    staging = Staging(model, Stages.of(model, ["1"]), StagePlaces.of("1f1b", 2, 2, 0), lambda value, _: value, CPU)

    assert {name: staging.owner(name) for name in model.state_dict()} == {
        "0.0.weight": 0,
        "0.0.bias": 0,
        "1.weight": 1,
        "1.bias": 1,
    }


def test_calls_for_tied_weights_name_both_and_the_way_out(start: Callable[..., unisono.Run]) -> None:
    run, model = start(), Tied()
    run.fully_shard(model[1])

    with pytest.raises(ModelError, match=r"weight of an earlier call and 2\.weight are one .*fully_shard\(\[a, b\]\)"):
        run.fully_shard(model)


def test_modules_in_a_list_are_one_call(start: Callable[..., unisono.Run]) -> None:
    run, model = start(), Tied()
    pair = [model[1], model[2]]

    assert run.fully_shard(pair) is pair
    assert run.fully_shard(model) is model
    assert len(list(model.parameters())) == 7


@pytest.mark.parametrize("given", [[], [3], "model"])
def test_what_is_no_module_is_refused(given: Any, start: Callable[..., unisono.Run]) -> None:
    with pytest.raises(ModelError, match=r"run.fully_shard takes a module, or a list of modules .*, not "):
        start().fully_shard(given)


FROZEN = nn.Parameter(torch.ones(3), requires_grad=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False, "mesh": None, "ignored_params": {FROZEN}, "shard_placement_fn": None},
        {"reshard_after_forward": None, "mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()},
    ],
)
def test_options_that_mean_the_same_everywhere_are_taken(options: dict[str, Any]) -> None:
    require_options(options)


@pytest.mark.parametrize(
    ("options", "way"),
    [
        (
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
            "arithmetic={'precision': 'bf16'}",
        ),
        ({"offload_policy": CPUOffloadPolicy()}, "spread the model over more of them"),
        ({"reshard_after_forward": 2}, "use True or False"),
        ({"shard_placement_fn": lambda _: None}, "slices are cut along the first dimension"),
        ({"ignored_params": {nn.Parameter(torch.ones(3))}}, "only frozen parameters can be left out"),
        ({"mesh": object()}, "start workers with --devices-per-worker"),
        ({"dp_mesh_dims": object()}, "start workers with --devices-per-worker"),
        ({"device_id": 0}, "run.fully_shard takes no device_id="),
    ],
)
def test_other_options_are_refused_with_the_way_that_works(options: dict[str, Any], way: str) -> None:
    with pytest.raises(ModelError) as refused:
        require_options(options)
    assert way in str(refused.value)


def test_a_plan_that_cuts_tied_weights_in_two_ways_is_refused() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    model = nn.ModuleDict({"words": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["words"].weight
    ties = Ties([model])

    ties.require_same_parts({"words": RowwiseParallel(), "h*": ColwiseParallel()})
    ties.require_same_parts({})
    for plan in ({"head": ColwiseParallel()}, {"words": ColwiseParallel(), "head": ColwiseParallel()}):
        with pytest.raises(ModelError, match=r"words\.weight and head\.weight are one parameter .*have both cut alike"):
            ties.require_same_parts(plan)
