"""What a worker traces: every digest that a comparison needs, and the same ones for the same values."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unisono.launch.comparison import Stage, read_moments
from unisono.plan.batches import Batches, Position
from unisono.train.model.tensors import digest, tensors_of
from unisono.train.record.trace import Trace, content_digest
from unisono.train.step.step import Call, Clip
from unisono.train.step.word import ShardReport, StepReport

pytestmark = pytest.mark.unit


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Trace]:
    opened = Trace.open(tmp_path / "traces", 2)
    assert opened is not None
    yield opened
    opened.close()


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "traces" / "rank-2.jsonl").read_text().splitlines()]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def a_call(optimizer: torch.optim.Optimizer) -> Call:
    batch = Batches.even(samples=8, batch_size=8, shards=4).at(Position(step=5))
    shards = [torch.ones(2, 2), torch.zeros(2, 2)]
    return Call(5, 1, batch, shards, lambda model, batch: None, (optimizer,), Clip(norm=1.5))


def traced_call(trace: Trace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, of which a call was traced."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trace.step(5, tensors_of(net))
    trace.call_worked_out(a_call(optimizer), range(2, 4), a_report())
    return net, optimizer


def a_report() -> StepReport:
    shards = tuple(ShardReport(0.5, 2.0) for _ in range(4))
    return StepReport(shards, 0.5, 8.0, {}, ())


def test_weights_are_traced_with_the_digest_that_finish_prints(trace: Trace, tmp_path: Path) -> None:
    net = model()
    trace.step(0, tensors_of(net))

    (line,) = lines(tmp_path)

    assert list(line["tensors"]) == list(net.state_dict())
    assert line["sha256"] == digest(net)


def test_a_call_traces_what_went_in_and_what_the_shards_came_to(trace: Trace, tmp_path: Path) -> None:
    net, _optimizer = traced_call(trace)

    weights, line = lines(tmp_path)

    assert (line["step"], line["call"]) == (5, 1)
    assert line["before"] == {name: weights["tensors"][name] for name, _ in net.named_parameters()}
    assert list(line["inputs"]) == ["2", "3"]
    assert line["inputs"]["2"] != line["inputs"]["3"]
    assert [float.fromhex(loss) for loss in line["losses"]] == [0.5] * 4
    assert line["samples"] == [2, 2, 2, 2]
    assert line["clip"] == {"clip_norm": 1.5, "clip_value": None}


def test_an_update_traces_gradients_settings_and_what_became_of_the_parameters(trace: Trace, tmp_path: Path) -> None:
    net, optimizer = traced_call(trace)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(net.parameters()).grad = None
    optimizer.step()
    trace.step(6, tensors_of(net))

    _, _, update, weights = lines(tmp_path)

    names = [name for name, _ in net.named_parameters()]
    assert list(update["gradients"]) == names[1:]  # the first has none
    assert update["options"]["lr"] == 0.1
    assert "params" not in update["options"]
    assert update["after"] == {name: weights["tensors"][name] for name in names}


def test_a_parameter_of_no_module_is_traced_under_its_number(trace: Trace, tmp_path: Path) -> None:
    temperature = nn.Parameter(torch.ones(()))
    net = model()
    optimizer = torch.optim.SGD([*net.parameters(), temperature], lr=0.1)
    trace.step(5, tensors_of(net))
    trace.call_worked_out(a_call(optimizer), range(2, 4), a_report())

    assert list(lines(tmp_path)[1]["before"])[-1] == "optimizer parameter 4"


def test_parameter_groups_keep_their_settings_apart(trace: Trace, tmp_path: Path) -> None:
    net = model()
    first, *others = net.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.5, "hook": print}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    trace.call_worked_out(a_call(optimizer), range(2, 4), a_report())
    optimizer.step()

    options = lines(tmp_path)[1]["options"]

    assert (options["lr of parameter group 0"], options["lr of parameter group 1"]) == (0.5, 0.1)
    assert options["hook of parameter group 0"] == "builtin_function_or_method"  # no address


def test_a_closed_trace_no_longer_listens_to_optimizers(tmp_path: Path) -> None:
    trace = Trace.open(tmp_path / "traces", 2)
    _, optimizer = traced_call(trace)
    trace.close()

    optimizer.step()

    assert len(lines(tmp_path)) == 2


def test_a_second_run_of_a_script_is_appended(trace: Trace, tmp_path: Path) -> None:
    trace.step(0, {})
    second = Trace.open(tmp_path / "traces", 2)
    second.step(0, {})
    second.close()
    assert len(lines(tmp_path)) == 2


def test_a_trace_reads_as_the_moments_of_a_step_in_their_order(trace: Trace, tmp_path: Path) -> None:
    net, optimizer = traced_call(trace)
    optimizer.step()
    trace.step(6, tensors_of(net))

    stages = [moment.stage for moment in read_moments(lines(tmp_path))]

    made_up = {Stage.JOB, Stage.FLOW, Stage.LENGTH}
    assert stages == [stage for stage in Stage if stage not in made_up]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(3), torch.tensor([0.0, 0.0, -0.0])),
        (torch.zeros(3), np.zeros(3)),
        (np.array(["a", None]), np.array(["b", None])),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"b": 1}),
        ("text", "Text"),
        ({1, 2}, {1, 3}),
        (SimpleNamespace(x=1), SimpleNamespace(x=2)),
        (None, 0),
        ((torch.eye(2).to_sparse(),), (torch.zeros(2, 2).to_sparse(),)),
    ],
    ids=str,
)
def test_batches_of_other_content_have_other_digests(one: Any, other: Any) -> None:
    assert content_digest(one) != content_digest(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.ones(2), {"label": torch.zeros(1), "name": ["a", "b"]}],
        lambda: {"c", "b", "a"},
        lambda: SimpleNamespace(inside=SimpleNamespace(x=torch.ones(1))),
        object,
        lambda: print,
    ],
)
def test_batches_of_equal_content_have_equal_digests_whatever_their_addresses(make: Any) -> None:
    kept = make()
    assert content_digest(kept) == content_digest(make())


def test_a_batch_that_holds_itself_has_a_digest() -> None:
    batch: list[Any] = [{1, 2}]
    batch.append(batch)
    assert len(content_digest(batch)) == 16
