"""The data of a loop: how they are read, into which batches they are cut, and which data are refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unisono.adapt.view import BatchShape
from unisono.data.content import CONTENT, Contents, Glance
from unisono.data.feed import Feed, Options
from unisono.data.feeds import LoopFeeds, StreamFeed
from unisono.data.shards import Source
from unisono.errors import DataError, JobError, PolicyError
from unisono.job import default_shards
from unisono.plan.batches import Batches, EpochCut
from unisono.received import short
from unisono.settings.table import MOST
from unisono.train.config.run_config import RunConfig
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.loop.course import Course, CutCourse, StreamCourse
from unisono.train.loop.loop_watch import LoopWatch
from unisono.train.loop.prefetch import prefetch
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.trained import Reading


@dataclass(frozen=True, slots=True)
class LoopData:
    """The data of one loop.

    Attributes:
        batches: the batches of each epoch, of the loop's own size.
        own_size: whether the script sets a batch size for this loop.
    """

    feed: Feed | StreamFeed
    batches: Batches
    reading: Reading
    epochs: int
    own_size: bool

    def course(self, config: RunConfig, collectives: CollectiveCalls) -> tuple[Course, Source]:
        """Return the steps of the loop, and the source of their shards."""
        if isinstance(self.feed, StreamFeed):
            stream = self.feed.source(config.job.shards)
            return StreamCourse(stream, config.job.shards, collectives.together, self.feed.promised), stream
        load = partial(prefetch, self.feed.source, processes=self.feed.processes, device=config.device)
        return CutCourse(self.batches, load), self.feed.source

    def require(self, shape: BatchShape, strategy: str, *, has_own_weights: bool) -> None:
        """Refuse a batch or a strategy that policies have set and these data cannot have.

        Raises:
            PolicyError: a policy wants a batch that the data cannot have.
            JobError: the workers no longer make the steps of a stream together.
        """
        require_shape(self.feed, shape, BatchShape(self.batches.batch_size, self.batches.shards))
        require_strategy(self.feed, strategy, has_own_weights=has_own_weights)

    def steps_in(self, epoch: int, samples: int) -> int:
        """Return the number of steps in an epoch with batches of ``samples`` samples."""
        return replace(self.batches, batch_size=samples).of(epoch).steps


class LoopDataSets:
    """Takes the data sets of a script's loops, and requires that all workers have the same.

    Args:
        policy_state: the policies, which are based on the job's batch.
    """

    def __init__(
        self, config: RunConfig, policy_state: PolicyState, collectives: CollectiveCalls, watch: LoopWatch
    ) -> None:
        self._config, self._policy_state, self._collectives, self.watch = config, policy_state, collectives, watch
        self._contents, self._feeds = Contents(), LoopFeeds(config.job.seed, config.settings.faults.timeout_s)

    def feed(self, dataset: Any, options: Options, loop: int, epochs: int) -> Feed | StreamFeed:
        """Return what a loop reads."""
        return self._feeds.of(dataset, options, loop, epochs)

    def agreed(
        self, dataset: Any, feed: Feed | StreamFeed, epochs: int, batch_size: int | None, begin: int
    ) -> LoopData:
        """Return the data of a loop, after all workers have compared theirs. Collective.

        Raises:
            JobError: nothing sets the size of batches, or two settings contradict each other.
            DataError: there is no step in the first epoch.
            JobMismatch: workers have other data; names what differs.
        """
        shards, (samples, is_own) = self._config.job.shards, self._batch_of(feed, batch_size)
        content = self._contents.of(dataset, feed, Glance(shards, samples, tell=self.watch.tell))
        is_open = self._config.has_open_shards and not isinstance(feed, StreamFeed)
        filled = min(default_shards(samples), shards) if is_open else None
        same = {**feed.same(), "batch size": samples, "begin": begin, "filled shards": filled, CONTENT: content}
        self._collectives.agree("data set", same, feed.cure)
        self.watch.compare(dataset, self._collectives)
        batches = Batches(feed.order.cut, samples, shards, filled)
        first = batches.of(0)
        require_steps(feed, first, samples)
        noted = "" if self._config.settings.checkpoints.allow_job_change else content
        reading = Reading(first.samples, feed.shuffle, feed.drop_last, feed.order.digest, noted, filled)
        return LoopData(feed, batches, reading, epochs, is_own)

    def _batch_of(self, feed: Feed | StreamFeed, batch_size: int | None) -> tuple[int, bool]:
        """The samples in a loop's global batches: the loop's own number, unless another one is set from outside.

        Returns:
            the number, and whether the script sets it for this loop.

        Raises:
            JobError: nothing sets it, it is below 1, the loader has another one, or policies are based on the job's.
        """
        config, by_script = self._config, self._config.script_batch_size
        if batch_size is not None and not 1 <= batch_size <= MOST:
            limit = _limit(batch_size)
            raise JobError(f"run.steps(batch_size={short(batch_size)}): needs a number of samples from 1 on{limit}")
        own_size = batch_size or (feed.batch_size if feed.is_batched else None) or by_script or feed.batch_size
        if own_size is None:
            raise JobError(
                "run.steps: nobody says how many samples a global batch has. Give it a DataLoader that does, "
                "run.steps(…, batch_size=…), or unisono.init(batch_size=…)"
            )
        size = own_size if config.batch_set_by is None else config.job.require_batch_size(config.batch_set_by)
        require_batches(feed, size, own_size)
        if own_size != by_script and not self._policy_state.is_empty:
            raise JobError(
                f"run.steps(batch_size={batch_size}): policies need the job's batch size in every loop, "
                f"which is {config.job.batch_size}: set it in unisono.init, or use no policies"
            )
        return size, own_size != by_script


def require_batches(feed: Feed | StreamFeed, batch_size: int, own_size: int) -> None:
    """Refuse a loader with another batch size than the script sets: its batches are global batches.

    ``own_size`` is the loop's own; ``batch_size`` may have been set from outside.

    Raises:
        JobError: the sizes differ.
    """
    if feed.batch_size not in (None, own_size):
        own = (
            ""
            if feed.sized_by == "loader"
            else ". Only batches of a batch sampler of a class of your own may be uneven"
        )
        raise JobError(
            f"the {feed.sized_by} has batch_size={feed.batch_size}, the job has batch_size={own_size}: a loader's "
            f"batch is the global batch, over all workers. Say the same in unisono.init and in the {feed.sized_by}{own}"
        )
    if feed.is_batched and batch_size != own_size:
        raise JobError(f"batch_size={batch_size} is set from outside, and {feed.decides(own_size)}")


def require_counts(epochs: int, max_steps: int | None, begin: int) -> None:
    """Refuse negative numbers of epochs or steps, and such as nobody counts to.

    Raises:
        JobError: a number is out of range; names it.
    """
    for name, count in (("epochs", epochs), ("max_steps", max_steps), ("begin", begin)):
        if count is not None and not 0 <= count <= MOST:
            raise JobError(f"run.steps({name}={short(count)}): needs a number from 0 on{_limit(count)}")


def _limit(count: int) -> str:
    return f", and at most {MOST}" if count > MOST else ""


def require_steps(feed: Feed | StreamFeed, first: EpochCut, batch_size: int) -> None:
    """Refuse data whose first epoch has no step, if that is known.

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
    """Refuse a batch of another shape where the data decide the shape. ``base`` is the shape that the script sets.

    Raises:
        PolicyError: a policy has changed what a batch sampler or a stream's readers decide.
    """
    if feed.is_batched and shape.samples != base.samples:
        raise PolicyError(f"a policy wants batches of {shape.samples} samples, and {feed.decides(base.samples)}")
    if isinstance(feed, StreamFeed) and shape.shards != base.shards:
        raise PolicyError(
            f"a policy wants to cut batches into {shape.shards} shards, and the stream has {base.shards} readers, one "
            f"for each shard of the job: leave shards out where the batch size is set"
        )


def require_strategy(feed: Feed | StreamFeed, strategy: str, *, has_own_weights: bool) -> None:
    """Refuse a stream if workers make steps by themselves.

    Raises:
        JobError: they do, and streams are read for steps that all workers make together.
    """
    if isinstance(feed, StreamFeed) and has_own_weights:
        raise JobError(
            f"strategy={strategy!r}: streams are read for steps that all workers make together. Use all-reduce, or a "
            f"map-style data set"
        )
