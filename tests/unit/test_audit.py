"""Shards that are drawn are computed again by others: who computes wrongly is found, and nothing else changes."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from side_by_side import side_by_side
from unisono.data.generators import generators_kept
from unisono.errors import MemoryFault
from unisono.job import Job
from unisono.plan.audits import AuditResult, audited, auditors, judged_audit
from unisono.plan.batches import Batch
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import digest
from unisono.train.recovery.compared_steps import Audits
from unisono.train.step.part import Attempt
from unisono.train.step.step import Call, Clip
from unisono.train.step.step_engine import StepEngine
from unisono_lab.faults.injector import flip

pytestmark = pytest.mark.unit


def test_the_share_of_the_work_is_that_which_is_drawn_and_the_same_whoever_asks() -> None:
    drawn = [audited(3, 0.05, step, 0, 8) for step in range(2000)]
    assert drawn == [audited(3, 0.05, step, 0, 8) for step in range(2000)]
    assert 0.04 < sum(map(len, drawn)) / 16000 < 0.06
    assert audited(3, 1.0, 7, 0, 8) == tuple(range(8))
    assert audited(3, 0.0, 7, 0, 8) == ()
    assert drawn != [audited(4, 0.05, step, 0, 8) for step in range(2000)]


def test_three_different_workers_have_to_do_with_an_audit_where_there_are_three() -> None:
    for workers in (3, 4, 7):
        for owner in range(workers):
            seen = [auditors(owner, workers, step, 0) for step in range(workers)]
            assert all(len({owner, *pair}) == 3 for pair in seen)
            assert len({first for first, _ in seen}) == workers - 1
    assert auditors(0, 2, 5, 1) == (1, 1)
    assert auditors(0, 1, 5, 1) == (0, 0)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({0: ["a"], 1: ["a"]}, AuditResult(4, frozenset((0, 1)), is_clean=True)),
        ({0: ["a"], 1: ["b"]}, None),
        ({0: ["b", "b"], 1: ["a", "a"], 2: ["a"]}, AuditResult(4, frozenset((1, 2)), 0)),
        ({0: ["a", "a"], 1: ["b", "b"], 2: ["a"]}, AuditResult(4, frozenset((0, 2)), 1)),
        ({0: ["b", "a"], 1: ["a", "a"], 2: ["a"]}, AuditResult(4, frozenset((1, 2)), 0, is_transient=True)),
        ({0: ["b", "a"], 1: ["a", "a"]}, AuditResult(4, frozenset((1,)), 0, is_transient=True)),
        ({0: ["a", "a"], 1: ["b", "b"]}, None),
        ({0: ["a", "b", "b"]}, AuditResult(4, frozenset(), 0, is_transient=True)),
        ({0: ["a", "b", "c"]}, None),
        ({0: ["b", "b"], 1: ["c", "c"], 2: ["a"]}, None),
    ],
)
def test_who_is_wrong_is_said_only_where_most_results_agree(results: Any, expected: AuditResult | None) -> None:
    assert judged_audit(4, results) == expected


# -- in whole steps

SAMPLES, SHARDS, STEPS = 24, 4, 5


class Net(nn.Module):
    """Has buffers, and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 9)
        self.calls: Tensor
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return torch.tanh(self.last(hidden))


torch.manual_seed(0)
NET = Net()


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), (batch[:, 0] > 0).long())


def trained(
    workers: Workers, audit: float, wrong: int | None = None, hook: Callable[[Tensor], Tensor] | None = None
) -> tuple[str, list[list[AuditResult]]]:
    """The digest of the weights, and what was found in each step."""
    model = copy.deepcopy(NET)
    prepared = Prepared.of(model, [torch.optim.Adam(model.parameters(), lr=0.1)])
    shards = workers.transport.split.shards
    found: list[list[AuditResult]] = []

    class Found(Audits):
        def report(self, result: AuditResult) -> None:
            found[-1].append(result)

    engine = StepEngine(
        Job.create(batch_size=SAMPLES, shards=shards),
        workers,
        prepared,
        torch.device("cpu"),
        Execution(audit=audit),
        [Found(0, audit)] if audit else [],
    )
    if wrong == workers.rank and hook is not None:
        model.first.weight.register_hook(hook)
    bounds = tuple(SAMPLES * shard // shards for shard in range(shards + 1))
    try:
        for step in range(STEPS):
            inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(step))
            cut = [inputs[start:stop] for start, stop in pairwise(bounds)]
            mine = workers.split(shards).of(workers.rank)
            batch = Batch(0, 0, SAMPLES, bounds, False)
            call = Call(
                step, 0, batch, [cut[one] for one in mine], loss_fn, prepared.optimizers, Clip(), load=cut.__getitem__
            )
            found.append([])
            attempt = engine.attempt(call)
            assert isinstance(attempt, Attempt)
            engine.work_out(attempt)
            engine.make(attempt)
        return digest(model), found
    finally:
        engine.close()


def everybody(number: int, *about: Any, shards: int = SHARDS) -> list[Any]:
    return side_by_side(number, lambda workers: trained(workers, *about), shards=shards)


def wrongly(gradient: Tensor, bit: int = 0) -> Tensor:
    found = gradient.clone()
    flip(found, 0, bit)
    return found


class Once:
    """Computes wrongly the so-manieth time, and never again."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, gradient: Tensor) -> Tensor:
        self.left -= 1
        return gradient if self.left else wrongly(gradient)


@pytest.fixture(scope="module")
def expected() -> str:
    with generators_kept():
        return str(everybody(1, 0.0)[0][0])


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_an_audit_decides_no_bit_and_finds_nothing_where_nothing_is(number: int, share: float, expected: str) -> None:
    told = everybody(number, share)
    assert {weights for weights, _ in told} == {expected}
    findings = [one for step in told[0][1] for one in step]
    assert len(findings) == sum(len(audited(0, share, step, 0, SHARDS)) for step in range(STEPS)) > 0
    assert all(one.is_clean for one in findings)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_processor_that_computes_wrongly_is_named_by_all_three(wrong: int) -> None:
    told = everybody(3, 1.0, wrong, wrongly)
    assert all(found == told[0][1] for _, found in told)
    named = {one.wrong for step in told[0][1] for one in step}
    assert wrong in named
    assert named <= {wrong, None}
    assert not any(one.is_transient for step in told[0][1] for one in step)


def test_two_that_differ_every_time_cannot_be_told_apart_and_the_error_names_both() -> None:
    with pytest.raises(MemoryFault, match=r"(?s)rank 0 on host .*rank 1 on host .* cannot be decided which is right"):
        everybody(2, 1.0, 1, wrongly)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_result_that_is_wrong_once_is_computed_again_before_it_counts(number: int, expected: str) -> None:
    told = everybody(number, 1.0, number - 1, Once(1))
    assert {weights for weights, _ in told} == {expected}
    assert any(one.wrong == number - 1 and one.is_transient for step in told[0][1] for one in step)


def test_a_worker_alone_that_computes_wrongly_every_time_is_right_for_all_it_knows(expected: str) -> None:
    ((weights, found),) = everybody(1, 1.0, 0, partial(wrongly, bit=31))  # no rounding in the update hides a sign
    assert weights != expected
    assert all(one.is_clean for step in found for one in step)


def test_a_single_shard_is_audited_beside_its_own_gradient() -> None:
    alone, checked = (everybody(1, share, shards=1)[0] for share in (0.0, 1.0))
    assert alone[0] == checked[0]
    assert all(one.is_clean for step in checked[1] for one in step)
