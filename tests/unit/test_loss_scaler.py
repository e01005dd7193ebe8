"""The scaler of a guest on a run: it changes nothing, and knows the scale as torch's own does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono
from unisono.errors import Unreadable
from unisono.integrations.kit import RunScaler

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]


def test_it_leaves_losses_gradients_and_steps_alone(start: Start) -> None:
    scaler = RunScaler(start(arithmetic={"precision": "fp16"}))
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.5)
    scaler.scale(2 * weight).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (weight.item(), scaler.get_scale()) == (0.0, 65536.0)


def test_its_state_is_that_of_torchs_scaler_in_both_directions(start: Start) -> None:
    scaler, of_torch = (
        RunScaler(start(arithmetic={"precision": "fp16"})),
        torch.amp.GradScaler("cpu", init_scale=2.0**9),
    )
    assert scaler.state_dict().keys() == of_torch.state_dict().keys()
    scaler.load_state_dict({**of_torch.state_dict(), "_growth_tracker": 7})
    of_torch.load_state_dict(scaler.state_dict())
    assert scaler.get_scale() == of_torch.get_scale() == 2.0**9
    assert of_torch.state_dict() == scaler.state_dict()
    scaler.load_state_dict({})  # of a scaler that was not enabled
    with pytest.raises(Unreadable):
        scaler.load_state_dict({**of_torch.state_dict(), "scale": 3.0})
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize(
    "state",
    [
        {"_growth_tracker": 1},
        {"scale": [2.0], "_growth_tracker": 1},
        {"scale": True, "_growth_tracker": True},
        {"scale": 2.0, "_growth_tracker": 1.5},
        {"scale": 10**400, "_growth_tracker": 1},
        [2.0],
    ],
)
def test_what_a_file_says_of_a_scale_is_not_believed(start: Start, state: Any) -> None:
    with pytest.raises(Unreadable):
        RunScaler(start(arithmetic={"precision": "fp16"})).load_state_dict(state)
