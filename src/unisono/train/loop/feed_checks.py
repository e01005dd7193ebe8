"""What a loop refuses of the data that it is given, before its first step and where policies change it."""

from unisono.adapt.view import BatchShape
from unisono.data.feed import Feed
from unisono.data.stream_feed import StreamFeed
from unisono.errors import DataError, JobError, PolicyError
from unisono.plan.epoch_cut import EpochCut


def require_batches(feed: Feed | StreamFeed, batch_size: int, said: int) -> None:
    """A loader's batches are global batches: they have the size that the job says.

    Args:
        feed: what the loop reads.
        batch_size: the number of samples in a global batch.
        said: the batch size that the script says; there may be another one from outside.

    Raises:
        JobError: they have not.
    """
    if feed.batch_size not in (None, said):
        raise JobError(
            f"the loader has batch_size={feed.batch_size}, the job has batch_size={said}: a loader's batch is the "
            f"global batch, over all workers. Say the same in unisono.init and in the DataLoader"
        )
    if feed.is_batched and batch_size != said:
        raise JobError(f"batch_size={batch_size} is set from outside, and {feed.decides(said)}")


def require_counts(epochs: int, max_steps: int | None) -> None:
    """The numbers that end a loop are no less than 0.

    Raises:
        JobError: one is; names it.
    """
    for name, count in (("epochs", epochs), ("max_steps", max_steps)):
        if count is not None and count < 0:
            raise JobError(f"run.steps({name}={count}): needs a number from 0 on")


def require_steps(feed: Feed | StreamFeed, first: EpochCut, batch_size: int) -> None:
    """The first epoch has to have a step, if that can be known.

    Raises:
        DataError: it has none.
    """
    if first.steps or isinstance(feed, StreamFeed):
        return
    if not first.samples:
        raise DataError("the loader's sampler gives nothing for the first epoch: check what it chooses from")
    raise DataError(
        f"drop_last leaves nothing of {first.samples} samples with batch_size={batch_size}: "
        f"keep the last, smaller batch, or lower batch_size"
    )


def require_shape(feed: Feed | StreamFeed, shape: BatchShape, base: BatchShape) -> None:
    """Policies may change the batch, where nothing else decides it.

    Args:
        feed: what the loop reads.
        shape: the shape of the next global batch.
        base: the shape that the script says.

    Raises:
        PolicyError: they have, and a batch sampler or a stream's readers decide it.
    """
    if feed.is_batched and shape.samples != base.samples:
        raise PolicyError(f"a policy wants batches of {shape.samples} samples, and {feed.decides(base.samples)}")
    if isinstance(feed, StreamFeed) and shape.shards != base.shards:
        raise PolicyError(
            f"a policy wants to cut batches into {shape.shards} shards, and the stream has {base.shards} readers, one "
            f"for each shard of the job: leave shards out where the batch size is set"
        )


def require_strategy(feed: Feed | StreamFeed, strategy: str, *, has_own_weights: bool) -> None:
    """Streams are read for steps that all workers make together.

    Raises:
        JobError: workers make steps by themselves.
    """
    if isinstance(feed, StreamFeed) and has_own_weights:
        raise JobError(
            f"strategy={strategy!r}: streams are read for steps that all workers make together. Use all-reduce, or a "
            f"map-style data set"
        )
