"""The control word: what every worker tells all others once per step, beside the gradients."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.adapt.view import Timings
from unisono.errors import LossError
from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.tally import PRIME, is_balanced
from unisono.words import MODULUS

MAX_METRICS = 16
"""How many metrics one loss function may log; the control word has one fixed size."""

_TIMES = tuple(one.name for one in fields(Timings))
_FLAG_NAMES = ("leave", "regroup", "again", "lost", "flipped", "checkpoint", "diverges")
_FLAGS = len(_FLAG_NAMES)
_HEADER = f"{_FLAGS}?{8 - _FLAGS}x{len(_TIMES)}d4Q"  # flags; times; a digest and balances, with which nothing computes
_FIXED = 4  # loss, weight, squared norm, which metrics
_ROW = _FIXED + MAX_METRICS

_times_of = attrgetter(*_TIMES)
_flags_of = attrgetter(*_FLAG_NAMES)
_Row = Sequence[float]


@dataclass(slots=True)
class ShardReport:
    """The result of one shard.

    Attributes:
        loss: the mean over the shard's samples (or tokens).
        weight: the number of its samples (or tokens); 0 for an empty shard.
        metrics: further means, weighted alike.
        squared_norm: the squared norm of that mean's gradient; 0 if nobody wants to know.
    """

    loss: float = 0.0
    weight: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    squared_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of the whole step: the same on every worker, and for every number of workers.

    Attributes:
        shards: one report per shard, in order; metrics are those of this worker's names.
        loss: the weighted mean.
        weight: the sum of the shards' weights.
        metrics: the weighted means.
        used: one flag per tensor that was asked about: whether any shard used it.
        told: what any worker says: its flags alone.
        is_balanced: whether all that was read of partial sums is what was written.
    """

    shards: tuple[ShardReport, ...]
    loss: float
    weight: float
    metrics: dict[str, float]
    used: tuple[bool, ...]
    told: "Flags"
    is_balanced: bool = True


class Balance(NamedTuple):
    """The balance of a worker's tallies; see :class:`unisono.reduce.tally.Tally`."""

    balance: int = 0
    copies: int = 0


@dataclass(frozen=True, slots=True)
class Flags:
    """The message of a worker to all others in each step, besides the results of its shards.

    Attributes:
        leave: it was asked to leave, and the job with it.
        regroup: it knows that a new generation is due.
        again: one of its gradients came in several parts, so its sums are not to be used.
        lost: an update of its own was computed from a gradient that memory had not kept.
        flipped: a bit of what it alone looks at is another one than the update before has left.
        checkpoint: it was asked for a checkpoint.
        diverges: something of the sums that it has finished is NaN or infinite.
        digest: a digest (64 bits) of the weights with which its shards were computed; 0 if nobody compares weights.
        amiss: what that lacks, if a bit has flipped, to be the digest of what the update before has left.
        timings: the times that it measured.
        balance: the words of partial sums that it wrote, less those that it read.
    """

    leave: bool = False
    regroup: bool = False
    again: bool = False
    lost: bool = False
    flipped: bool = False
    checkpoint: bool = False
    diverges: bool = False
    digest: int = 0
    amiss: int = 0
    timings: Timings = field(default_factory=Timings)
    balance: Balance = field(default_factory=Balance)


@dataclass(frozen=True, slots=True)
class ControlWord:
    """Packs one worker's part of the control word, and opens everybody's.

    A word is a row of bytes of the same length on every worker: flags, then numbers for each shard (as many as the
    widest worker has), then one bit per tensor.
    """

    split: Split
    tensors: int

    @property
    def length(self) -> int:
        """Bytes of one worker's word."""
        return self._form.size + -(-self.tensors // 8)

    @property
    def _form(self) -> Struct:
        return _form(self.split.widest)

    def pack(self, reports: Sequence[ShardReport], used: Sequence[bool], flags: Flags) -> torch.Tensor:
        """This worker's word: uint8, 1-D of ``length``.

        Raises:
            LossError: more metrics than a control word has room for.
        """
        form, (balance, copies) = self._form, flags.balance
        rows = [number for report in reports for number in _row(report)]
        rows += [0.0] * (self.split.widest * _ROW - len(rows))
        numbers = form.pack(
            *_flags_of(flags),
            *_times_of(flags.timings),
            *(flags.digest, flags.amiss, balance % MODULUS, copies % PRIME),
            *rows,
        )
        bits = np.packbits(np.array(used, dtype=bool)).tobytes()
        return torch.frombuffer(bytearray(numbers + bits), dtype=torch.uint8)

    def open(self, words: torch.Tensor) -> "ControlWords":
        """All workers' words, of shape (world size, length)."""
        form = self._form
        rows = np.ascontiguousarray(words.numpy())
        told = [form.unpack_from(row) for row in rows]
        used = np.unpackbits(np.bitwise_or.reduce(rows[:, form.size :], axis=0), count=self.tensors).astype(bool)
        shards = [
            one[_SHARDS + _ROW * number :][:_ROW]
            for rank, one in enumerate(told)
            for number in range(len(self.split.of(rank)))
        ]
        return ControlWords(tuple(map(_flags, told)), shards, tuple(used.tolist()))


_TOLD = _FLAGS + len(_TIMES)
_SHARDS = _TOLD + 4


def _flags(told: Sequence[Any]) -> Flags:
    digest, amiss, *balance = told[_TOLD:_SHARDS]
    timings = Timings(*told[_FLAGS:_TOLD])
    flags = dict(zip(_FLAG_NAMES, told[:_FLAGS], strict=True))
    return Flags(**flags, digest=digest, amiss=amiss, timings=timings, balance=Balance(*balance))


@cache
def _form(rows: int) -> Struct:
    return Struct(f"<{_HEADER}{rows * _ROW}d")


@dataclass(frozen=True, slots=True)
class ControlWords:
    """Everybody's control words.

    Attributes:
        flags: what each worker says, by rank.
        rows: the numbers of each shard, in order.
        used: one flag per tensor: whether any worker's shard used it.
    """

    flags: tuple[Flags, ...]
    rows: Sequence[_Row]
    used: tuple[bool, ...]

    @property
    def logged(self) -> float | None:
        """Tells which metrics the first shard that is not empty has logged; None if all are."""
        return next((row[_FIXED - 1] for row in self.rows if row[1]), None)

    def has_silent_worker(self, split: Split) -> bool:
        """Whether some worker had nothing but empty shards, or none, and so cannot know which metrics were logged."""
        return any(not any(self.rows[shard][1] for shard in split.of(rank)) for rank in range(split.workers))

    def read(self, names: Sequence[str]) -> StepReport:
        """What all of them say together.

        Args:
            names: the metrics that this worker's shards logged.

        Raises:
            LossError: shards logged different metrics.
        """
        shards = tuple(_report(row, shard, names) for shard, row in enumerate(self.rows))
        weight = _total([report.weight for report in shards])
        loss = _mean([(report.loss, report.weight) for report in shards], weight)
        metrics = {
            name: _mean([(report.metrics.get(name, 0.0), report.weight) for report in shards], weight) for name in names
        }
        return StepReport(
            shards,
            loss,
            weight,
            metrics,
            self.used,
            Flags(**any_of(self.flags)),
            is_balanced=is_balanced(*zip(*(each.balance for each in self.flags), strict=True)),
        )


def any_of(flags: Sequence[Flags]) -> dict[str, Any]:
    """Which flags any of these has."""
    return {name: any(getattr(each, name) for each in flags) for name in _FLAG_NAMES}


def _row(report: ShardReport) -> list[float]:
    if len(report.metrics) > MAX_METRICS:
        raise LossError(f"{len(report.metrics)} metrics logged in one loss function: at most {MAX_METRICS} fit")
    logged = [report.metrics[name] for name in sorted(report.metrics)]
    logged += [0.0] * (MAX_METRICS - len(logged))
    return [report.loss, report.weight, report.squared_norm, signature_of(report.metrics), *logged]


def _report(row: _Row, shard: int, names: Sequence[str]) -> ShardReport:
    loss, weight, squared_norm, signature = row[:_FIXED]
    if weight == 0:
        return ShardReport()
    if signature != signature_of(names):
        logged = ", ".join(sorted(names)) or "nothing"
        raise LossError(
            f"shard {shard} logged other metrics than this worker's shards ({logged}): "
            f"call run.log with the same names in every call of the loss function"
        )
    values = row[_FIXED : _FIXED + len(names)]
    return ShardReport(loss, weight, dict(zip(sorted(names), values, strict=True)), squared_norm)


def signature_of(metrics: Iterable[str]) -> float:
    """A number that stands for these names."""
    digest = hashlib.blake2b("\n".join(sorted(metrics)).encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "little"))


def _total(values: Sequence[float]) -> float:
    leaves = {Node(shard, shard + 1): value for shard, value in enumerate(values)}
    return SummationTree(len(values)).finish(leaves, lambda left, right: left + right)


def _mean(pairs: Sequence[tuple[float, float]], weight: float) -> float:
    if weight == 0:
        return float("nan")
    return _total([value * share if share else 0.0 for value, share in pairs]) / weight
