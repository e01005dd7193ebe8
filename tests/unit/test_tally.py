"""A bit that flips in a gradient or in a partial sum between its writing and its last use is found."""

import copy
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from side_by_side import Connect, OverProcessGroup, TorchRendezvousStore, gloo, over_shared_memory, run_over
from unisono.errors import MemoryFault
from unisono.job import Job
from unisono.membership.rendezvous import Generation
from unisono.plan.batches import Batch
from unisono.plan.split import Split
from unisono.reduce.buckets import plan_buckets
from unisono.reduce.partial_sums import (
    PIECE,
    UNTALLIED,
    PartialSumRow,
    PartialSums,
    Tally,
    Witness,
    is_balanced,
    windows,
)
from unisono.reduce.peers import meet
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.reduce.shared_memory import HierarchicalTransport, host_split
from unisono.reduce.transport import Solo, Transport
from unisono.train.config.run_config import CHECKS, Execution
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import digest
from unisono.train.recovery.compared_steps import StateDigests
from unisono.train.recovery.integrity import Integrity
from unisono.train.recovery.known_states import StateCopies
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.trained import Trained
from unisono.train.step.gradient_parts import MemoryChecks
from unisono.train.step.part import Attempt
from unisono.train.step.step import Call, Clip
from unisono.train.step.step_engine import StepEngine
from unisono.word_sums import totals
from unisono.words import SMALL, ManyWords, bytes_of, sum_of_words
from unisono_lab.faults.injector import flip

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
STEPS, SHARDS = 3, 4


# -- sums of words


@given(st.integers(1, 200), st.integers(0, 63), st.integers(0, 10**6), st.sampled_from(["float32", "bfloat16", "int8"]))
def test_every_single_bit_changes_the_sum_of_words(numel: int, bit: int, place: int, dtype: str) -> None:
    values = torch.arange(numel + 3).to(getattr(torch, dtype))[3:]  # it begins in the middle of a word
    before = sum_of_words(values)
    flip(values, place % numel, bit)
    assert sum_of_words(values) % 2**64 != before % 2**64


@given(
    st.lists(st.tuples(st.integers(0, 3 * SMALL), st.sampled_from(["float32", "bfloat16", "int8"])), max_size=6),
    st.integers(0, 3),
)
def test_many_memories_have_the_sums_that_each_has_by_itself(made: list[tuple[int, str]], cut: int) -> None:
    tensors = [torch.arange(numel + cut).to(getattr(torch, dtype))[cut:] for numel, dtype in made]
    words = ManyWords([bytes_of(tensor) for tensor in tensors])
    for _ in range(2):  # the second time of other values
        assert totals(words.thirds()).tolist() == [sum_of_words(tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.add_(1)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(256, 4000), st.integers(0, 1000))
def test_every_element_is_looked_at_in_turn_and_no_more_than_is_allowed(
    units: list[int], budget: int, turn: int
) -> None:
    lengths = [64 * unit for unit in units]
    size = 4 * sum(lengths)
    turns = -(-size // budget)
    seen = [set[int]() for _ in lengths]
    for number in range(turn, turn + turns):
        found = windows(lengths, size, budget, number)
        assert all(part.start % 64 == 0 for part in found)
        assert 4 * sum(map(len, found)) <= budget + 4 * 64 * len(lengths)
        for elements, part in zip(seen, found, strict=True):
            elements |= set(part)
    assert [len(elements) for elements in seen] == lengths
    assert windows(lengths, size, None, turn) == [range(length) for length in lengths]
    assert not any(windows(lengths, size, 0, turn))


@pytest.mark.parametrize("compressed", [None, torch.bfloat16])
def test_partial_sums_have_the_same_bits_with_and_without_a_tally_and_leave_a_balance_of_what_is_to_be_read(
    compressed: torch.dtype | None,
) -> None:
    shards = [[torch.randn(700, 500), torch.randn(3, 5, 4, 4).to(memory_format=torch.channels_last)] for _ in range(5)]
    assert shards[0][0].numel() > 2 * PIECE
    shards[2][1] = torch.randn(3, 5, 4, 4)  # another layout than its place has
    tree = Solo(5).tree
    buckets = plan_buckets(shards[0], 10**9, compressed)
    found: list[list[Tensor]] = []
    for seen_of, at_once in itertools.product((None, (), (640, PIECE + 128)), (False, True)):
        tally = UNTALLIED if seen_of is None else Tally(*seen_of)  # the last one sees a part of two pieces
        found.append([])
        for bucket in buckets:
            sums = PartialSums(tree.summands(range(5)), [PartialSumRow.of(bucket, bucket.allocate()) for _ in range(3)])
            sums.begin()
            for shard in shards:
                sums.open()
                given = [None if shard[each.index] is shards[1][1] else shard[each.index] for each in bucket.entries]
                for place, gradient in enumerate(() if at_once else given):
                    sums.put(place, gradient, tally)
                if at_once:
                    sums.put_all(given, tally)
                sums.close()
            found[-1] += sums.partials()
        if tally is not UNTALLIED:
            seen = [flat[tally._start : tally._stop] for flat in found[-1]]
            assert (tally.balance - sum(map(sum_of_words, seen))) % 2**64 == 0
    assert len(found) == 6
    for each in found:
        assert all(torch.equal(*(flat.view(torch.uint8) for flat in pair)) for pair in zip(each, found[0], strict=True))


# -- over every transport


class TwoHosts:
    """Two workers on each."""

    def __call__(self, rank: int, split: Split, board: TorchRendezvousStore, timeout_s: float) -> Transport:
        number, place = divmod(rank, 2)
        hosts = host_split(split, 2)
        between = gloo(number, hosts, board, timeout_s, f"across-{place}")
        across = ProcessGroupTransport(between, number, hosts, CPU)
        everyone = ProcessGroupTransport(gloo(rank, split, board, timeout_s), rank, split, CPU)
        return HierarchicalTransport(meet(place, 2, Host(board, number), timeout_s), rank, split, across, everyone)


class Host:
    """The store of one host."""

    def __init__(self, board: TorchRendezvousStore, number: int) -> None:
        self._board, self._number = board, number

    def post(self, name: str, value: bytes) -> None:
        self._board.post(f"{self._number}/{name}", value)

    def read(self, name: str) -> bytes:
        return self._board.read(f"{self._number}/{name}")


WAYS: dict[str, tuple[Connect, Split]] = {
    "alone": (over_shared_memory, Split.even(SHARDS, 1)),
    "shared memory of 2": (over_shared_memory, Split.even(SHARDS, 2)),
    "shared memory of 3": (over_shared_memory, Split.even(SHARDS, 3)),
    "shared memory with a server": (over_shared_memory, Split.even(SHARDS, 3).with_servers(1)),
    "direct": (OverProcessGroup("direct"), Split.even(SHARDS, 3)),
    "ring": (OverProcessGroup("ring"), Split.even(SHARDS, 3)),
    "tree": (OverProcessGroup("tree"), Split.even(SHARDS, 4)),
    "direct with a server": (OverProcessGroup("direct"), Split.even(SHARDS, 2).with_servers(1)),
    "collectives": (OverProcessGroup(None), Split.even(SHARDS, 3)),
    "hierarchical": (TwoHosts(), Split.even(SHARDS, 4)),
}
over_every_way = pytest.mark.parametrize(("connect", "split"), WAYS.values(), ids=WAYS)


@over_every_way
def test_what_is_written_is_balanced_by_what_is_read_and_one_bit_is_not(connect: Connect, split: Split) -> None:
    (bucket,) = plan_buckets([torch.empty(64 * 9), torch.empty(64 * 50)], 10**9)

    def reduce(struck: bool, transport: Transport) -> tuple[tuple[int, int], bool, Tensor]:
        mine = transport.split.of(transport.rank)
        nodes = transport.tree.cover(mine.start, mine.stop)
        rows = [row[0] for row in transport.allocate([bucket], max(1, len(nodes)))]
        tally = Tally()
        for row, node in zip(rows, nodes, strict=False):
            row.copy_(torch.arange(bucket.numel) + node.start)
            tally.wrote(row, 0)
        if struck and transport.rank == 0:
            flip(rows[0], 700, 3)
        total = transport.reduce("b", rows, 4.0, tally).clone()
        kept = tally.has_kept()
        return (tally.balance, tally.copies), kept, total

    for struck in (False, True):
        told = run_over(connect, split, partial(reduce, struck))
        assert is_balanced(*zip(*(balance for balance, _, _ in told), strict=True)) is not struck
        assert all(kept for _, kept, _ in told)
        assert all(torch.equal(total, told[0][2]) for _, _, total in told)


# -- in whole steps


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
SAMPLES = 24


class Flips:
    """Flips one bit, of what is written for the so-manieth time."""

    def __init__(self, place: str, number: int, *, bit: int = 31, always: bool = False) -> None:
        self.place, self.number, self.bit, self.always = place, number, bit, always
        self.seen = 0

    def __call__(self, place: str, values: Tensor) -> None:
        if place != self.place:
            return
        self.seen += 1
        if self.seen == self.number or (self.always and self.seen >= self.number):
            # Another bit each time: of one bit, a flip up and a flip down may cancel each other in a sum of words.
            flip(values, 1, self.bit + self.always * self.seen)


def trained(
    workers: Workers,
    shards: int,
    witness: Witness | None = None,
    clip: float | None = None,
    checks: str = "all",
    bucket_mb: float = 4.0,
) -> tuple[str, list[int], bool]:
    model = copy.deepcopy(MODEL)
    prepared = Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
    job = Job.create(batch_size=SAMPLES, shards=shards, bucket_mb=bucket_mb)
    repeated: list[int] = []
    how, memory = Execution(checked_bytes=CHECKS[checks]), MemoryChecks(repeated.append)
    trained = Trained({}, PolicyState((), SAMPLES, shards))
    digests = StateDigests(Integrity(trained, StateCopies(trained), None), memory)
    engine = StepEngine(job, workers, prepared, CPU, how, [digests, memory])
    engine.witness = witness
    try:
        for step in range(STEPS):
            attempt = engine.attempt(called(step, shards, workers, prepared, clip))
            assert isinstance(attempt, Attempt)
            attempt.parts.judge(attempt)
            engine.work_out(attempt)
            engine.make(attempt)
        return digest(model), repeated, memory.has_lost
    finally:
        engine.close()


def called(step: int, shards: int, workers: Workers, prepared: Prepared, clip: float | None) -> Call:
    bounds = tuple(SAMPLES * shard // shards for shard in range(shards + 1))
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(step))
    mine = [inputs[bounds[shard] : bounds[shard + 1]] for shard in workers.split(shards).of(workers.rank)]
    batch = Batch(0, 0, SAMPLES, bounds, False)
    return Call(step, 0, batch, mine, loss_fn, prepared.optimizers, Clip(clip))


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), (batch[:, 0] > 0).long())


def everybody(
    connect: Connect, split: Split, struck: int, witness: Witness | None, **about: Any
) -> list[tuple[str, list[int], bool]]:
    def work(transport: Transport) -> Any:
        workers = Workers(Generation(1, transport.rank, split), transport)
        return trained(workers, split.shards, witness if transport.rank == struck else None, **about)

    return run_over(connect, split, work)


def serial(**about: Any) -> str:
    ((found, repeated, lost),) = everybody(over_shared_memory, Split.even(SHARDS, 1), 0, None, **about)
    assert (repeated, lost) == ([], False)
    return str(found)


@pytest.mark.parametrize("bucket_mb", [4.0, 1e-4])  # gradients are taken together, or as they arrive
@over_every_way
def test_a_bit_that_flips_in_a_partial_sum_leaves_no_trace_in_the_weights(
    connect: Connect, split: Split, bucket_mb: float
) -> None:
    expected = serial()
    counter = Flips("partial_sum", 0)
    everybody(connect, split, 0, counter, bucket_mb=bucket_mb)
    for number in {1, 2, counter.seen // 2, counter.seen}:
        told = everybody(connect, split, 0, Flips("partial_sum", number), bucket_mb=bucket_mb)
        assert {weights for weights, _, _ in told} == {expected}
        assert all(len(repeated) == 1 for _, repeated, _ in told), number


def test_without_checks_the_same_flip_changes_the_weights() -> None:
    def struck(checks: str) -> Any:
        flips = Flips("partial_sum", 1)
        with pytest.MonkeyPatch.context() as patch:
            if checks == "blind":
                patch.setattr(Tally, "_part", lambda tally, values, start: None)
            return everybody(over_shared_memory, Split.even(SHARDS, 2), 0, flips)

    assert {weights for weights, _, _ in struck("seeing")} == {serial()}
    assert serial() not in {weights for weights, _, _ in struck("blind")}


@over_every_way
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_bit_that_flips_in_the_mean_gradient_is_told_by_whoever_keeps_it(
    connect: Connect, split: Split, clip: float | None
) -> None:
    with pytest.raises(MemoryFault, match="that memory had not kept"):
        everybody(connect, split, split.workers - 1, Flips("gradient", 1), clip=clip)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_with_a_single_shard_the_gradient_is_kept_where_autograd_has_put_it(clip: float | None) -> None:
    alone = Split.even(1, 1)
    ((weights, _, lost),) = everybody(over_shared_memory, alone, 0, Flips("gradient", 9), clip=clip)  # in the last step
    ((expected, _, intact),) = everybody(over_shared_memory, alone, 0, None, clip=clip)
    assert (lost, intact) == (True, False)
    assert weights != expected


def struck_in_the_backward_pass(change: Callable[[Tensor], object]) -> bool:
    """Whether a worker says of its last step that memory has not kept its gradient; the last layer's comes first."""
    model = copy.deepcopy(MODEL)
    prepared = Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    first, *_, last = model.parameters()
    alone = Split.even(1, 1)
    workers = Workers(Generation(1, 0, alone), Solo(1))
    memory = MemoryChecks()
    engine = StepEngine(Job.create(batch_size=SAMPLES, shards=1), workers, prepared, CPU, Execution(), [memory])

    def strike(_: Tensor) -> None:
        assert last.grad is not None
        change(last.grad)

    hook = first.register_post_accumulate_grad_hook(strike)
    try:
        attempt = engine.attempt(called(0, 1, workers, prepared, None))
        assert isinstance(attempt, Attempt)
        engine.work_out(attempt)
        engine.make(attempt)
        return memory.has_lost
    finally:
        hook.remove()
        engine.close()


def test_a_bit_that_flips_while_other_gradients_are_computed_is_found() -> None:
    assert struck_in_the_backward_pass(lambda gradient: flip(gradient, 0, 5))
    assert not struck_in_the_backward_pass(lambda gradient: None)


def test_a_hook_of_the_script_may_change_a_gradient_that_was_looked_at() -> None:
    assert not struck_in_the_backward_pass(lambda gradient: gradient.mul_(2.0))


def test_memory_that_never_keeps_what_is_written_ends_the_job() -> None:
    with pytest.raises(MemoryFault, match=r"step 0: .* 4 times in a row .* faulty"):
        everybody(over_shared_memory, Split.even(SHARDS, 3), 1, Flips("partial_sum", 1, bit=3, always=True))


def test_a_part_of_a_large_gradient_is_checked_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "some", 100)
    expected = serial(checks="none")
    assert serial(checks="some") == expected
    repeats = []
    for number in range(1, 13):
        told = everybody(over_shared_memory, Split.even(SHARDS, 1), 0, Flips("partial_sum", number), checks="some")
        repeats.append(len(told[0][1]))
    assert 0 < sum(repeats) < len(repeats)


def test_no_thread_is_left() -> None:
    everybody(over_shared_memory, Split.even(SHARDS, 2), 0, None)
    assert "unisono-reducer" not in {thread.name for thread in threading.enumerate()}
