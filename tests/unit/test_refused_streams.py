"""Streams of other libraries that give batches, or a share of their samples for each process: refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import webdataset
from torch.utils.data import DataLoader

from unisono.data.feed import Options
from unisono.data.feeds import feed_of, gives_whole_batches
from unisono.data.sample_order import LoopKey
from unisono.errors import DataError

pytestmark = pytest.mark.unit


def feed(data: Any) -> Any:
    return feed_of(data, Options(), LoopKey(0, 0), 30)


def hugging_face() -> Any:
    import datasets  # takes a second to load

    return datasets.Dataset.from_dict({"number": list(range(24))}).to_iterable_dataset(num_shards=4)


@pytest.fixture
def tar(tmp_path: Path) -> str:
    with webdataset.TarWriter(str(tmp_path / "0.tar")) as writer:
        writer.write({"__key__": "0", "number.cls": 0})
    return str(tmp_path / "0.tar")


def of_web(tar: str) -> Any:
    return webdataset.WebDataset(tar, shardshuffle=False)


def test_streams_of_webdataset_that_make_batches_are_refused(tar: str) -> None:
    batched = of_web(tar).batched(16)
    for one in (
        batched,
        batched.map(lambda batch: batch),
        DataLoader(batched, batch_size=None),
        DataLoader(batched, batch_size=16),
        webdataset.WebLoader(batched, batch_size=None, num_workers=0),
        webdataset.WebLoader(of_web(tar), batch_size=16, num_workers=0),
    ):
        with pytest.raises(DataError, match="makes batches itself, and each would be taken for one sample"):
            feed(one)


def test_streams_of_webdataset_that_give_samples_are_taken(tar: str) -> None:
    for one in (
        of_web(tar),
        of_web(tar).decode().to_tuple("number.cls"),
        of_web(tar).batched(16).unbatched(),
        webdataset.WebLoader(of_web(tar), batch_size=None, num_workers=0),
        DataLoader(of_web(tar), batch_size=16),
    ):
        assert feed(one) is not None


def test_a_stream_that_draws_its_files_anew_in_each_process_is_refused_however_few_there_are(tar: str) -> None:
    resampled = webdataset.WebDataset(tar, resampled=True, shardshuffle=False)
    for one in (
        resampled,
        resampled.decode().to_tuple("number.cls"),
        DataLoader(resampled, batch_size=4),
        webdataset.WebLoader(resampled, batch_size=None, num_workers=0),
        webdataset.DataPipeline(webdataset.ResampledShards(tar, deterministic=True), webdataset.tarfile_to_samples()),
    ):
        with pytest.raises(DataError, match=r"draws its files anew in each process and in each pass"):
            feed(one)


def test_streams_of_hugging_face_that_make_batches_are_refused() -> None:
    for one in (hugging_face().batch(4), hugging_face().map(lambda row: row).batch(4).with_format("torch")):
        with pytest.raises(DataError, match="makes batches itself"):
            feed(one)


def test_streams_of_hugging_face_that_map_over_batches_give_samples() -> None:
    stream = hugging_face()
    for one in (
        stream,
        stream.map(lambda rows: rows, batched=True),
        stream.shuffle(seed=0),
        stream.with_format("torch"),
    ):
        assert not gives_whole_batches(one)
        assert feed(one) is not None


def test_a_share_of_a_stream_for_each_process_is_refused_as_a_distributed_sampler_is() -> None:
    from datasets.distributed import split_dataset_by_node

    share = split_dataset_by_node(hugging_face(), 1, 2)
    for one in (share, share.shuffle(seed=0), share.map(lambda row: row), DataLoader(share, batch_size=4)):
        with pytest.raises(DataError, match="split_dataset_by_node gives this process share 1 of 2"):
            feed(one)
    assert feed(split_dataset_by_node(hugging_face(), 0, 1)) is not None


def test_batches_that_hugging_face_makes_of_tables_are_refused() -> None:
    with pytest.raises(DataError, match="makes batches itself"):
        feed(hugging_face().with_format("arrow").batch(4))
