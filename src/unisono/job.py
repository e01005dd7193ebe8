"""The job as a frozen, validated value, and how two of them differ."""

from collections.abc import Mapping
from typing import Annotated, Any

from unisono.errors import JobError
from unisono.settings.groups import Row, group
from unisono.settings.table import MOST, Arithmetic, BatchSettings

SAMPLES_PER_SHARD = 16
"""The fewest samples that the default number of shards leaves in a shard."""

DEFAULT_SHARDS = 8
"""The most shards that a job gets by default."""


def default_shards(batch_size: int | None) -> int:
    """The largest power of two up to 8 that leaves at least 16 samples per shard; 8 if the batch size is unknown."""
    if batch_size is None:
        return DEFAULT_SHARDS
    shards = 1
    while shards < DEFAULT_SHARDS and batch_size // (2 * shards) >= SAMPLES_PER_SHARD:
        shards *= 2
    return shards


def shards_of_workers(workers: int, batch_size: int | None = None) -> int:
    """The shards to propose for so many workers: a power of two, unless the batch is too small for that."""
    shards = 1 << (workers - 1).bit_length()
    return shards if batch_size is None or shards <= batch_size else workers


@group("")
class Job(Arithmetic, BatchSettings):
    """The settings that decide the bits of the final weights, besides the script itself: see :mod:`unisono.settings`.

    Attributes:
        shards: the fixed slices of the global batch; also the largest number of workers that the job can use.
        bucket_mb: the size of the buckets that are reduced together, in MiB.

    Raises:
        JobError: a setting is of the wrong type or out of range; names it, its value and what is allowed.
    """

    shards: Annotated[int, Row("the slices of the batch", least=1, most=MOST)]
    bucket_mb: Annotated[float, Row("the size of buckets", least=1e-6, most=2**16)] = 4.0

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.shards > self.batch_size:
            raise JobError(
                f"shards={self.shards} is more than batch_size={self.batch_size}: a shard is a slice of the "
                f"batch, so set shards to at most {self.batch_size} (default here: "
                f"{default_shards(self.batch_size)})"
            )

    @property
    def bucket_bytes(self) -> int:
        """The size of the buckets in bytes."""
        return int(self.bucket_mb * 2**20)

    @classmethod
    def create(cls, *, batch_size: Any = None, shards: int | None = None, **settings: Any) -> "Job":
        """A job from settings, with ``shards`` following from the batch size unless given.

        Raises:
            JobError: a setting is of the wrong type or out of range; names it, its value and what is allowed.
        """
        if shards is None:  # a batch size of another type is refused below, whatever the shards
            shards = default_shards(batch_size) if isinstance(batch_size, int | None) else 1
        return cls(batch_size=batch_size, shards=shards, **settings)

    def require_batch_size(self, what: str) -> int:
        """The number of samples in one global batch.

        Args:
            what: the name of what needs it, for the error.

        Raises:
            JobError: the job has no batch size.
        """
        if self.batch_size is None:
            raise JobError(f"{what}: needs the batch size of the job. Set it in unisono.init(batch_size=…)")
        return self.batch_size

    def require_workers(self, workers: int) -> None:
        """Refuse more workers than there are shards.

        Raises:
            JobError: says which ``shards=`` to set.
        """
        if workers <= self.shards:
            return
        if self.batch_size is not None and workers > self.batch_size:
            plural = "s" if self.batch_size > 1 else ""
            raise JobError(
                f"{workers} workers cannot share a batch of {self.batch_size} sample{plural}: start at most "
                f"{self.batch_size} worker{plural}, or raise batch_size"
            )
        shards, plural = shards_of_workers(workers, self.batch_size), "s" if self.shards > 1 else ""
        raise JobError(
            f"{workers} workers, but the job has only {self.shards} shard{plural}, and a worker needs at least one: "
            f"set shards={shards} (unisono.init(shards={shards}), or unisono run --shards {shards}), or "
            f"start at most {self.shards} worker{plural}. Other shards give other bits: keep the number from then on"
        )


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Each field in which two flat mappings differ, as ``field: ours, theirs``."""
    fields = list(dict.fromkeys([*ours, *theirs]))
    absent = "absent"
    return [
        f"{field}: {ours.get(field, absent)!s} here, {theirs.get(field, absent)!s} there"
        for field in fields
        if ours.get(field, absent) != theirs.get(field, absent)
    ]
