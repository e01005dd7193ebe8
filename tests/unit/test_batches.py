from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.batches import Batches, Position

pytestmark = pytest.mark.unit

loops = st.builds(
    Batches.even,
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 64),
    shards=st.integers(1, 12),
    drop_last=st.booleans(),
)


@given(batches=loops, epochs=st.integers(0, 3))
def test_every_sample_of_every_epoch_is_in_exactly_one_shard_of_one_batch(batches: Batches, epochs: int) -> None:
    seen = [
        (batch.epoch, place)
        for _, batch in batches.remaining(Position(), epochs)
        for shard in range(batches.shards)
        for place in batch.shard(shard)
    ]
    assert seen == [(epoch, place) for epoch in range(epochs) for place in range(batches.of(0).used)]


@given(batches=loops, data=st.data())
def test_a_loop_resumed_at_any_step_goes_on_as_if_nothing_had_happened(batches: Batches, data: st.DataObject) -> None:
    whole = list(batches.remaining(Position(), 2))
    cut = data.draw(st.integers(0, len(whole)))
    start = whole[cut][0] if cut < len(whole) else Position(epoch=2)
    assert list(batches.remaining(start, 2)) == whole[cut:]


@given(batches=loops)
def test_an_epoch_has_as_many_steps_as_announced_and_ends_with_the_last(batches: Batches) -> None:
    steps = [batch for _, batch in batches.remaining(Position(), 1)]
    assert len(steps) == batches.of(0).steps
    assert [batch.is_last_in_epoch for batch in steps] == [False] * (len(steps) - 1) + [True] * bool(steps)


def test_a_last_smaller_batch_is_kept_unless_dropped() -> None:
    sizes = [batch.size for _, batch in Batches.even(10, 4, 2).remaining(Position(), 1)]
    dropped = [batch.size for _, batch in Batches.even(10, 4, 2, drop_last=True).remaining(Position(), 1)]
    assert (sizes, dropped) == ([4, 4, 2], [4, 4])


def test_a_batch_smaller_than_the_number_of_shards_leaves_the_last_shards_empty() -> None:
    ((_, batch),) = Batches.even(3, 8, 8).remaining(Position(), 1)
    assert [len(batch.shard(shard)) for shard in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("filled", "sizes"), [(1, [5, 0, 0, 0]), (2, [3, 0, 2, 0]), (4, [2, 1, 1, 1])])
def test_shards_that_have_samples_lie_evenly_between_the_empty_ones(filled: int, sizes: list[int]) -> None:
    batches = replace(Batches.even(11, 6, 4), filled=filled)
    _, last = [batch for _, batch in batches.remaining(Position(), 1)]
    assert [len(last.shard(number)) for number in range(4)] == sizes
    assert [sample for number in range(4) for sample in last.shard(number)] == [*range(6, 11)]


def test_positions_count_steps_and_samples_over_epochs() -> None:
    positions = [position for position, _ in Batches.even(10, 4, 2).remaining(Position(), 2)]
    assert [(p.step, p.samples, p.epoch, p.offset) for p in positions] == [
        (0, 0, 0, 0),
        (1, 4, 0, 4),
        (2, 8, 0, 8),
        (3, 10, 1, 0),
        (4, 14, 1, 4),
        (5, 18, 1, 8),
    ]
