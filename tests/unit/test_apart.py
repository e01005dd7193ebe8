"""Rounds from strategy to strategy."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from unisono.sync.all_reduce import AllReduce
from unisono.train.apart import Apart

pytestmark = pytest.mark.unit


def test_what_a_strategy_keeps_is_forgotten_in_steps_of_all_reduce() -> None:
    kept = ("model-averaging:momentum=0.9", {"previous": [torch.ones(3)]})
    trained = SimpleNamespace(adaptation=SimpleNamespace(strategy=AllReduce()), prepared=object(), strategy=kept)
    nothing = cast("Any", SimpleNamespace(is_elastic=False))
    apart = Apart(nothing, torch.device("cpu"), cast("Any", trained), nothing, nothing, timeout_s=1.0)
    apart.make()
    assert apart.rounds is None
    assert trained.strategy == ("", {})
