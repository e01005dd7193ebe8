"""The job as a frozen, validated value, and how two of them differ."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unisono.errors import JobError
from unisono.received import short

Reduction = Literal["exact", "native"]
Precision = Literal["float32", "bf16", "fp16"]
Compression = Literal["none", "bf16"]
NumericsLevel = Literal["native", "portable"]

SAMPLES_PER_SHARD = 16
"""The fewest samples that the default number of shards leaves in a shard."""

DEFAULT_SHARDS = 8
"""The most shards that a job gets by default."""


def default_shards(batch_size: int | None) -> int:
    """The largest power of two up to 8 that leaves at least 16 samples per shard; 8 of a batch not yet known."""
    if batch_size is None:
        return DEFAULT_SHARDS
    shards = 1
    while shards < DEFAULT_SHARDS and batch_size // (2 * shards) >= SAMPLES_PER_SHARD:
        shards *= 2
    return shards


class Job(BaseModel):
    """The settings that decide the bits of the final weights, besides the script itself.

    Attributes:
        batch_size: samples in one global batch; None if each loop says it.
        shards: fixed slices of the global batch; also the largest number of workers the job can use.
        seed: the seed of every random stream.
        threads: torch threads per worker; one thread and two give other bits.
        reduction: ``exact`` adds along the summation tree, ``native`` is the backend's own all-reduce.
        precision: ``float32`` leaves dtypes alone, ``bf16`` and ``fp16`` run forward passes under autocast; ``fp16``
            scales losses, too.
        compression: ``bf16`` rounds every leaf and every node of the summation tree to bfloat16, on every number of
            workers alike, and sends half the bytes.
        bucket_mb: the size of the buckets that are reduced together, in MiB.
        deterministic: whether operations without a deterministic version are refused.
        numerics: ``native`` computes as fast as each processor can, ``portable`` the same bits on x86 processors of
            several makers and generations.
        on_nan: the reaction to a loss or gradient that is NaN or infinite: ``stop`` the job or ``skip`` the step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int | None = Field(default=None, ge=1, lt=2**63)
    shards: int = Field(ge=1, lt=2**63)
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    threads: int = Field(default=1, ge=1, le=2**16)
    reduction: Reduction = "exact"
    precision: Precision = "float32"
    compression: Compression = "none"
    bucket_mb: float = Field(default=4.0, gt=0, le=2**16)
    deterministic: bool = True
    numerics: NumericsLevel = "native"
    on_nan: Literal["stop", "skip"] = "stop"

    @property
    def bucket_bytes(self) -> int:
        """The size of the buckets."""
        return int(self.bucket_mb * 2**20)

    @model_validator(mode="after")
    def _shards_fit(self) -> "Job":
        if self.batch_size is not None and self.shards > self.batch_size:
            raise ValueError(
                f"shards={self.shards} is more than batch_size={self.batch_size}: a shard is a slice of the "
                f"batch, so set shards to at most {self.batch_size} (default here: "
                f"{default_shards(self.batch_size)})"
            )
        return self

    @classmethod
    def create(cls, *, batch_size: Any = None, shards: int | None = None, **settings: Any) -> "Job":
        """A job from settings, with ``shards`` following from the batch size unless given.

        Raises:
            JobError: a setting is of the wrong type or out of range; names it, its value and the range.
        """
        if shards is None:  # of a batch size that is refused, any
            shards = default_shards(batch_size) if isinstance(batch_size, int | None) else 1
        try:
            return cls.model_validate({"batch_size": batch_size, "shards": shards, **settings}, strict=True)
        except ValidationError as error:
            raise JobError(_explain(error)) from None

    def require_batch_size(self, what: str) -> int:
        """The samples in one global batch.

        Args:
            what: the thing that goes by them, for the error.

        Raises:
            JobError: the job has no batch size.
        """
        if self.batch_size is None:
            raise JobError(f"{what}: needs the batch of the job. Say it in unisono.init(batch_size=…)")
        return self.batch_size

    def require_workers(self, workers: int) -> None:
        """Refuse more workers than there are shards.

        Raises:
            JobError: says which ``shards=`` to set.
        """
        if workers <= self.shards:
            return
        if self.batch_size is not None and workers > self.batch_size:
            raise JobError(
                f"{workers} workers cannot share a batch of {self.batch_size} samples: start at most "
                f"{self.batch_size} workers, or raise batch_size"
            )
        raise JobError(
            f"{workers} workers, but the job has only {self.shards} shards, and a worker needs at least one: "
            f"set shards={workers} (unisono.init(shards={workers}), or unisono run --shards {workers}), or "
            f"start at most {self.shards} workers. Other shards give other bits: keep the number from then on"
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


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{where}={short(problem['input'])}: {message}" if where else message)
    return "; ".join(lines)
