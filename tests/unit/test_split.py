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


@given(st.data())
def test_servers_are_the_last_ranks_and_the_others_share_the_shards_out_evenly(data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 8))
    shards = data.draw(st.integers(workers, 32))
    servers = data.draw(st.integers(0, workers - 1))
    split = Split.even(shards, workers).with_servers(servers)
    computing = Split.even(shards, workers - servers)
    assert (split.workers, split.shards) == (workers, shards)
    assert list(split.servers) == [rank for rank in range(workers) if not split.of(rank)]
    assert len(split.servers) == servers
    assert [split.of(rank) for rank in range(computing.workers)] == [
        computing.of(rank) for rank in range(computing.workers)
    ]
    assert [split.owner(shard) for shard in range(shards)] == [computing.owner(shard) for shard in range(shards)]
    assert split.refined(3 * shards).servers == split.servers


@pytest.mark.parametrize("servers", [3, 4, 9])
def test_where_nobody_would_be_left_to_compute_nobody_only_serves(servers: int) -> None:
    split = Split.even(8, 3)
    assert split.with_servers(servers) == split
    assert not split.servers


def test_workers_of_different_speed_keep_to_it_when_another_one_serves() -> None:
    assert Split((0, 5, 6, 8)).with_servers(1).bounds == (0, 7, 8, 8)  # five times as fast, and once
