"""What streams of Hugging Face, WebDataset and torch say of themselves, and a run cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from unisono.errors import DataError

BATCHES = {"_batched": True, "_unbatched": False, "_unlisted": False}
"""Stages of WebDataset by the names of their functions, and whether batches come out of them."""


def require_samples(stream: Any) -> None:
    """A stream gives samples, and all of them.

    Raises:
        DataError: it gives batches, a share of the samples for each process, or draws its files anew in each.
    """
    name = type(stream).__name__
    if gives_whole_batches(stream):
        raise DataError(
            f"{name} makes batches itself, and each would be taken for one sample: leave that out (.batched(…) or "
            f".batch(…), a WebLoader, a batch_size of a loader inside). Say the number of samples in a global batch in "
            f"unisono.init(batch_size=…), or in the DataLoader that you give run.steps, which may have a collate_fn"
        )
    share: Any = getattr(stream, "_distributed", None)
    if getattr(share, "world_size", 1) > 1:
        raise DataError(
            f"{name} is split by node: split_dataset_by_node gives this process share {share.rank} of "
            f"{share.world_size}, and Unisono shares the samples out itself: give it the whole stream"
        )
    if _resamples(stream):
        raise DataError(
            f"{name} draws its files anew in each process and in each pass (resampled=True), so workers would read "
            f"other samples: leave that out, and shuffle with a seed (shardshuffle=…, seed=…)"
        )


def gives_whole_batches(stream: Any) -> bool:
    """Whether what a stream gives are batches, as far as it tells."""
    if type(stream).__name__ == "BatcherIterDataPipe":
        return True
    is_batched = False
    for stage in _stages(stream):
        if isinstance(stage, DataLoader):
            is_batched = stage.batch_size is not None or gives_whole_batches(stage.dataset)
        is_batched = BATCHES.get(getattr(getattr(stage, "f", None), "__name__", ""), is_batched)
    return is_batched or _batches_last(getattr(stream, "_ex_iterable", None))


def _stages(stream: Any) -> list[Any]:
    """The stages of a stream of WebDataset; none of others."""
    stages = getattr(stream, "pipeline", None)
    return stages if isinstance(stages, list) else []


def _resamples(stream: Any) -> bool:
    """Whether a stage of a stream draws files with replacement: by the clock, or by how often it was read before."""
    return type(stream).__name__ == "ResampledShards" or any(
        _resamples(stage.dataset if isinstance(stage, DataLoader) else stage) for stage in _stages(stream)
    )


def _batches_last(examples: Any) -> bool:
    """Whether the last function that Hugging Face maps over examples makes batches of them."""
    mapped = next((one for one in _chain(examples) if hasattr(one, "function")), None)
    function = getattr(mapped, "function", None)
    is_theirs = str(getattr(function, "__module__", "")).startswith("datasets.")
    return is_theirs and getattr(function, "__name__", "") in ("_batch_fn", "_batch_arrow_table")


def _chain(examples: Any) -> Iterator[Any]:
    """An iterable of examples, and those that it reads, the last one first."""
    while examples is not None:
        yield examples
        examples = getattr(examples, "ex_iterable", None)
