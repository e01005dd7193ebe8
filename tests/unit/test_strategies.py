"""Strategies are values with a text; what cannot be is refused in clear words before anything is trained."""

import re
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import JobError
from unisono.plan.batches import Batches, Position
from unisono.reduce.buckets import NOTHING, pack, unpack
from unisono.sync import STRATEGIES, AllReduce, DiLoCo, LocalSGD, Strategy, strategy_of
from unisono_lab.strategies.averaging import ModelAveraging, PairAveraging, average
from unisono_lab.strategies.parameter_server import ParameterServer, shares

pytestmark = pytest.mark.unit

KINDS: dict[str, type[Strategy]] = {
    **STRATEGIES,
    **{kind.name: kind for kind in (ParameterServer, ModelAveraging, PairAveraging)},
}
"""Our own, and the lab's."""

counts = st.integers(1, 10**6)
rates = st.floats(0, 1, exclude_max=True)
servers = st.builds(
    ParameterServer,
    synchronous=st.just(False),
    servers=st.integers(0, 64),
    max_staleness=st.none() | st.integers(0, 10**6),
    staleness_aware=st.booleans(),
    delay_compensation=st.floats(0, 1e6),
    round_every=counts,
)
strategies = st.one_of(
    st.builds(AllReduce),
    st.builds(ParameterServer, servers=st.integers(0, 64)),
    servers,
    st.builds(ModelAveraging, alpha=rates, momentum=rates, round_every=counts),
    st.builds(PairAveraging, round_every=counts),
    st.builds(LocalSGD, every=counts, round_every=counts),
    st.builds(DiLoCo, every=counts, outer_rate=st.floats(0, 1e6), outer_momentum=rates, round_every=counts),
)


@given(strategy=strategies)
def test_a_strategy_is_the_one_of_its_text(strategy: Strategy) -> None:
    assert strategy_of(str(strategy)) == strategy
    assert str(strategy_of(str(strategy))) == str(strategy)
    assert strategy_of(strategy) is strategy


@pytest.mark.parametrize("name", KINDS)
def test_a_name_alone_is_the_strategy_with_its_defaults_and_the_other_way_round(name: str) -> None:
    assert strategy_of(name) == KINDS[name]()
    assert str(KINDS[name]()) == name


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_every_setting_has_a_default_and_is_read_from_text(name: str, kind: type[Strategy]) -> None:
    for field in fields(kind):
        assert field.default is not MISSING
        text = str(field.default).lower()
        assert strategy_of(f"{name}:{field.name}={text}") == kind()


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ("local-sgd:every=16", LocalSGD(every=16)),
        ("local-sgd:", LocalSGD()),
        ("diloco:outer_rate=1,every=5", DiLoCo(every=5, outer_rate=1)),
        ("parameter-server:synchronous=false,max_staleness=8", ParameterServer(synchronous=False, max_staleness=8)),
        ("parameter-server:synchronous=false,max_staleness=none", ParameterServer(synchronous=False)),
    ],
)
def test_settings_follow_the_name(given: str, strategy: Strategy) -> None:
    assert strategy_of(given) == strategy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("all_reduce", "'all_reduce': there is no such strategy; choose of all-reduce, local-sgd, diloco, model-av"),
        ("", "there is no such strategy"),
        (3, "strategy=3: give a unisono.Strategy, or the name of one: all-reduce"),
        ("local-sgd:k=8", "'k=8' is no setting of local-sgd; its settings are round_every, every, as in NAME=VALUE"),
        ("local-sgd:every", "'every' is no setting of local-sgd"),
        ("all-reduce:every=8", "'every=8' is no setting of all-reduce; it has no settings"),
        ("local-sgd:every=often", "LocalSGD(every='often'): needs a whole number of at least 1"),
        ("local-sgd:every=0", "LocalSGD(every=0): needs a whole number of at least 1"),
        ("local-sgd:every=1.5", "every=1.5"),
        ("local-sgd:every=true", "every=True"),
        ("local-sgd:round_every=0", "LocalSGD(round_every=0)"),
        ("diloco:outer_momentum=1", "DiLoCo(outer_momentum=1): needs a number of at least 0 and below 1"),
        ("diloco:outer_rate=-0.1", "DiLoCo(outer_rate=-0.1): needs a number of at least 0"),
        ("diloco:outer_rate=nan", "outer_rate='nan'"),
        ("diloco:outer_rate=inf", "outer_rate='inf'"),
        ("model-averaging:alpha=1", "ModelAveraging(alpha=1): needs a number of at least 0 and below 1"),
        ("model-averaging:momentum=-1", "ModelAveraging(momentum=-1)"),
        ("pair-averaging:round_every=-1", "PairAveraging(round_every=-1)"),
        ("parameter-server:servers=-1", "ParameterServer(servers=-1): needs a whole number of at least 0"),
        ("parameter-server:synchronous=1", "ParameterServer(synchronous=1): use True or False"),
        (
            "parameter-server:synchronous=false,max_staleness=-1",
            "ParameterServer(max_staleness=-1): needs a whole number of at least 0",
        ),
        ("parameter-server:max_staleness=8", "has no stale gradients: leave max_staleness"),
        ("parameter-server:max_staleness=0", "or use synchronous=False"),
        ("parameter-server:staleness_aware=true", "ParameterServer(synchronous=True) has no stale gradients"),
        ("parameter-server:delay_compensation=0.04", "ParameterServer(synchronous=True) has no stale gradients"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words_that_say_what_would(given: Any, words: str) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        strategy_of(given)


@pytest.mark.parametrize("strategy", [LocalSGD(), DiLoCo(), ModelAveraging(), PairAveraging()], ids=str)
def test_averaging_is_refused_with_one_worker(strategy: Strategy) -> None:
    strategy.require(2)
    with pytest.raises(JobError, match=r"with one worker: there is nobody to synchronise with. Start several"):
        strategy.require(1)


def test_exact_strategies_may_have_one_worker() -> None:
    for strategy in (AllReduce(), ParameterServer()):
        strategy.require(1)


@pytest.mark.parametrize("synchronous", [True, False])
def test_servers_need_somebody_who_computes(synchronous: bool) -> None:
    strategy = ParameterServer(synchronous=synchronous, servers=2)
    strategy.require(3)
    with pytest.raises(JobError, match="with 2 workers: 2 of them would serve, so none would compute"):
        strategy.require(2)


def trained_by_averaging(how: ModelAveraging, workers: int, steps: int, rate: float) -> float:
    """How far replicas that began a distance of 1 apart, and the central model, are from the best weights, 0."""
    replicas = torch.arange(1, workers + 1, dtype=torch.float64).unsqueeze(1)
    central, previous = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for _ in range(steps):
        apart = (replicas - central) * how.strength(workers)
        replicas.sub_(rate * replicas + apart)
        how.move(central, previous, apart.sum(0))
    return float(torch.cat([replicas[:, 0], central]).abs().max())


@given(workers=st.integers(1, 16), alpha=rates, momentum=st.floats(0, 0.95))
def test_replicas_and_central_model_settle_among_any_number_of_workers(
    workers: int, alpha: float, momentum: float
) -> None:
    how = ModelAveraging(alpha=alpha, momentum=momentum)
    assert trained_by_averaging(how, workers, steps=400, rate=0.0) < 100 * workers


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_strength_by_default_lets_any_number_of_workers_learn(workers: int, momentum: float) -> None:
    assert trained_by_averaging(ModelAveraging(momentum=momentum), workers, steps=400, rate=0.1) < 1e-6


def test_corrections_that_overshoot_are_refused_where_the_number_of_workers_stays() -> None:
    how = ModelAveraging(alpha=0.5)
    how.require(2)
    how.require(None)
    with pytest.raises(
        JobError, match=r"with 4 workers: the central model would overshoot.*alpha below 0\.4, or leave"
    ):
        how.require(4)
    ModelAveraging(alpha=0.5, momentum=0.9).require(4)
    ModelAveraging().require(1000)
    assert (how.strength(2), how.strength(4), how.strength(8)) == (0.5, 0.25, 0.125)


def test_only_sums_that_everybody_makes_alike_are_exact() -> None:
    assert {name for name, kind in KINDS.items() if kind().is_exact} == {"all-reduce", "parameter-server"}
    assert not ParameterServer(synchronous=False).is_exact


@given(every=st.integers(1, 100), round_every=st.integers(1, 100))
def test_a_round_of_local_steps_ends_with_an_averaging(every: int, round_every: int) -> None:
    steps = LocalSGD(every=every, round_every=round_every).round_steps
    assert steps % every == 0
    assert round_every <= steps < round_every + every


@given(sizes=st.lists(st.integers(0, 10**6), max_size=40), number=st.integers(1, 8))
def test_every_tensor_is_on_one_server_and_no_server_holds_a_whole_tensor_more_than_another(
    sizes: list[int], number: int
) -> None:
    held = shares(sizes, number)
    assert sorted(each for numbers in held for each in numbers) == list(range(len(sizes)))
    assert all(numbers == sorted(numbers) for numbers in held)
    filled = [sum(sizes[each] for each in numbers) for numbers in held]
    assert max(filled) - min(filled) <= max(sizes, default=0)


@given(mine=st.floats(-(2.0**99), 2.0**99, width=32), theirs=st.floats(-(2.0**99), 2.0**99, width=32))
def test_both_sides_of_a_pair_compute_the_same_mean(mine: float, theirs: float) -> None:
    one, other = torch.tensor([mine]), torch.tensor([theirs])
    assert torch.equal(average(one, other), average(other, one))
    torch.testing.assert_close(average(one, other).double(), (one.double() + other.double()) / 2)


@given(samples=st.integers(1, 100), size=st.integers(1, 64), shards=st.integers(1, 9), cuts=st.lists(st.integers(0, 9)))
def test_the_parts_of_a_batch_are_batches_with_the_same_shards(
    samples: int, size: int, shards: int, cuts: list[int]
) -> None:
    batch = Batches.even(samples, size, shards).at(Position())
    bounds = sorted({0, shards, *(cut for cut in cuts if cut < shards)})
    seen = 0
    for start, stop in pairwise(bounds):
        part = batch.part(range(start, stop))
        assert part.shards == stop - start
        assert [part.shard(number) for number in range(part.shards)] == [
            batch.shard(number) for number in range(start, stop)
        ]
        assert (part.epoch, part.is_last_in_epoch) == (batch.epoch, batch.is_last_in_epoch)
        seen += part.size
    assert seen == batch.size
    assert batch.part(range(shards)) == batch
    assert batch.part(range(0)).size == 0


def test_tensors_are_packed_and_unpacked_without_the_change_of_a_bit() -> None:
    tensors = [torch.randn(3, 4).t(), torch.tensor(2.5), torch.arange(5, dtype=torch.int16), torch.empty(0, 3)]
    tensors += [torch.randn(7).to(torch.bfloat16), torch.tensor([True, False]), torch.randn(2, dtype=torch.float64)]
    packed = pack(tensors)
    assert packed.dtype == torch.uint8
    for found, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    packed_before = packed.clone()
    tensors[0].add_(1.0)
    assert torch.equal(packed, packed_before)
    assert pack([]).numel() == NOTHING.numel() == 0


def test_bytes_of_other_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="64 bytes, where tensors of 128 were expected"):
        unpack(pack([torch.zeros(3)]), [torch.zeros(17)])


def test_what_is_unpacked_lies_where_it_is_needed_and_on_the_cpu_it_is_no_copy() -> None:
    packed = pack([torch.ones(3), torch.ones(2, 2)])
    here, there = unpack(packed, [torch.empty(3), torch.empty(2, 2, device="meta")])
    assert (there.device.type, there.shape) == ("meta", (2, 2))
    here.fill_(7.0)
    assert unpack(packed, [torch.empty(3), torch.empty(2, 2)])[0].tolist() == [7.0] * 3
