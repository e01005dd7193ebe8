"""The shuffle by blocks: a permutation that keeps blocks of neighbours together for some time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

import unisono
from benchmarks.thread_crew import Trade, train
from unisono.data.content import PLACES
from unisono.data.feed import Feed, Options
from unisono.data.sample_order import KeyedOrder, LoopKey
from unisono.errors import JobError, JobMismatch
from unisono.job import Job
from unisono.plan.order import BlockedOrder, BlockShuffle

unit, cluster = pytest.mark.unit, pytest.mark.cluster


@unit
@given(samples=st.integers(1, 400), size=st.integers(1, 60), window=st.integers(1, 9), epoch=st.integers(0, 3))
def test_every_sample_comes_once_and_blocks_are_not_gone_back_to(
    samples: int, size: int, window: int, epoch: int
) -> None:
    order = BlockedOrder(5, epoch, samples, BlockShuffle(size, window))
    found = order(np.arange(samples))
    assert sorted(found.tolist()) == list(range(samples))
    last_of = {block: place for place, block in enumerate((found // size).tolist())}
    begun = {block: samples - place - 1 for place, block in enumerate((found // size).tolist()[::-1])}
    for place in range(samples):
        assert sum(begun[block] <= place <= last_of[block] for block in last_of) <= window


@unit
@given(data=st.data(), samples=st.integers(1, 400), size=st.integers(1, 60), window=st.integers(1, 9))
def test_any_entry_can_be_had_alone(data: Any, samples: int, size: int, window: int) -> None:
    order = BlockedOrder(5, 1, samples, BlockShuffle(size, window))
    place = data.draw(st.integers(0, samples - 1))
    assert order(np.array([place])).tolist() == order(np.arange(samples))[place : place + 1].tolist()


@unit
def test_epochs_and_seeds_have_different_orders_and_the_first_one_never_changes() -> None:
    how = BlockShuffle(4, 2)
    orders = {tuple(BlockedOrder(seed, epoch, 42, how)(np.arange(42)).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert BlockedOrder(0, 0, 14, how)(np.arange(14)).tolist() == FIRST_ORDER


@unit
def test_a_large_data_set_costs_eight_bytes_a_block() -> None:
    order = KeyedOrder(10**9, 0, True, False, BlockShuffle(10_000))
    found = order.samples_at(3, range(10**9 - 256, 10**9))
    assert len({*found.tolist()}) == 256
    assert len({*(found // 10_000).tolist()}) <= 16


class Blocks(Dataset[Any]):
    """Keeps the blocks that it was asked for last, and counts those that it reads."""

    block_size = 16

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.misses = 0

    def __len__(self) -> int:
        return 250

    def __getitem__(self, index: int) -> Tensor:
        block = index // self.block_size
        if block not in self.kept:
            while len(self.kept) >= 4:
                del self.kept[next(iter(self.kept))]
            self.kept[block], self.misses = torch.arange(16.0).sin() + block, self.misses + 1
        return self.kept[block][index % self.block_size].reshape(1)


OF_SIXTEEN = BlockShuffle(16, window=4)


def trained(run: unisono.Run, blocks: BlockShuffle = OF_SIXTEEN) -> tuple[str, int]:
    data, model = Blocks(), nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.fill_(0.0)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for step in run.steps(data, epochs=2, shuffle=blocks):
        step.run(lambda model, batch: (model(batch) - 1).square().mean())
    return run.finish(), data.misses


@cluster
@pytest.mark.usefixtures("torch_settings_restored")
def test_weights_are_the_same_on_any_number_of_workers_and_in_a_run_that_resumes(tmp_path: Path) -> None:
    job = Job.create(batch_size=20, shards=5)
    ((serial, read),) = train(Trade(job, 1, tmp_path / "serial"), trained)
    assert 2 * 16 <= read <= 2 * 16 + PLACES  # each block once in an epoch, beside those that are compared at first
    for workers in (2, 3, 5):
        assert {digest for digest, _ in train(Trade(job, workers, tmp_path / f"{workers}"), trained)} == {serial}
    train(Trade(job, 3, tmp_path / "run", checkpoint_every=5, stop_after=17), trained)
    again = train(Trade(job, 2, tmp_path / "run", checkpoint_every=5), trained)
    assert {digest for digest, _ in again} == {serial}


@unit
def test_blocks_may_be_those_that_the_data_set_names() -> None:
    named, said = (
        Feed.of(Blocks(), Options(shuffle=how), LoopKey(0, 0, 0), 1.0) for how in ("blocks", BlockShuffle(16))
    )
    assert named.order == said.order
    assert named.same()["order of the sampler"] == "blocks of 16, 16 at a time"


@unit
@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize(
    ("shuffle", "message"),
    [
        ("block", "shuffle='block': use True, False, 'blocks', or unisono.BlockShuffle"),
        ("blocks", "goes by the block_size of a data set, and list has none: give it one, or say it"),
        (BlockShuffle(0), r"BlockShuffle\(size=0\): needs a number from 1 on"),
        (BlockShuffle(4, window=-1), r"BlockShuffle\(window=-1\): needs a number from 1 on"),
    ],
)
def test_what_is_no_shuffle_is_refused_in_clear_words(
    start: Callable[..., unisono.Run], shuffle: Any, message: str
) -> None:
    run, model = start(), nn.Linear(1, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(JobError, match=message):
        run.steps([1.0, 2.0], shuffle=shuffle)


@cluster
@pytest.mark.usefixtures("torch_settings_restored")
def test_a_run_that_resumes_with_other_blocks_is_refused(tmp_path: Path) -> None:
    job = Job.create(batch_size=20, shards=5)
    train(Trade(job, 1, tmp_path / "run", checkpoint_every=5, stop_after=17), trained)
    with pytest.raises(JobMismatch, match="blocks of 8, 4 at a time"):
        train(Trade(job, 1, tmp_path / "run", checkpoint_every=5), partial(trained, blocks=BlockShuffle(8, window=4)))


FIRST_ORDER = [11, 7, 8, 5, 6, 10, 4, 9, 1, 0, 3, 2, 12, 13]
