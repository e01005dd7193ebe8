import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.split import Split

pytestmark = pytest.mark.unit

SPEEDS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5)


def all_splits(shards: int, workers: int) -> list[Split]:
    if workers == 1:
        return [Split((0, shards))]
    return [
        Split((*before.bounds, shards))
        for last in range(workers - 1, shards)
        for before in all_splits(last, workers - 1)
    ]


@given(SPEEDS)
def test_no_other_split_is_faster_than_the_one_by_speed(seconds: list[float]) -> None:
    best = min(split.seconds(seconds) for split in all_splits(8, len(seconds)))
    assert Split.by_speed(8, seconds).seconds(seconds) == best


@given(st.integers(1, 8))
def test_workers_of_equal_speed_are_never_more_than_one_shard_apart(workers: int) -> None:
    split = Split.by_speed(8, [0.5] * workers)
    sizes = [len(split.of(rank)) for rank in range(workers)]
    assert max(sizes) - min(sizes) <= 1
    assert split == Split.even(8, workers)


def test_more_workers_than_shards_cannot_be_split_by_speed() -> None:
    with pytest.raises(ValueError, match="2 shards cannot be split among 3 workers"):
        Split.by_speed(2, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("split", [Split.even(8, 3), Split((0, 5, 8)), Split((0, 8))])
def test_a_finer_split_gives_every_worker_the_pieces_of_its_shards(split: Split) -> None:
    finer = split.refined(24)
    for rank in range(split.workers):
        assert {shard // 3 for shard in finer.of(rank)} == set(split.of(rank))
        assert len(finer.of(rank)) == 3 * len(split.of(rank))
    assert split.refined(8) == split


@pytest.mark.parametrize("shards", [0, 4, 12, -8])
def test_shards_that_are_no_multiple_are_refused(shards: int) -> None:
    with pytest.raises(ValueError, match=f"{shards} shards are no multiple of 8"):
        Split.even(8, 3).refined(shards)
