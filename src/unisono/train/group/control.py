"""The control word: what every worker tells all others once per step, beside the gradients."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from unisono.adapt.view import Timings
from unisono.errors import LossError
from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.tally import PRIME, is_balanced
from unisono.words import MODULUS

MAX_METRICS = 16
"""How many metrics one loss function may log; the control word has one fixed size."""

_FLAGS = 6
_DIGESTS = slice(_FLAGS, _FLAGS + 2)  # as bits: nothing computes with them
_TOLD = _DIGESTS.stop
_BALANCE = _TOLD + len(fields(Timings))
_HEADER = _BALANCE + 2
_FIXED = 4  # loss, weight, squared norm, which metrics

_Words = npt.NDArray[np.float64]


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
        leave: whether any worker was asked to leave, and the job with it.
        regroup: whether any worker knows of a new generation that is due.
        again: whether the step has to be computed once more, since a gradient came in several parts.
        lost: whether any worker's update before was computed from a gradient that memory had not kept.
        written: whether any worker's script has written to weights that workers share, which it sees by itself alone.
        is_balanced: whether all that was read of partial sums is what was written.
    """

    shards: tuple[ShardReport, ...]
    loss: float
    weight: float
    metrics: dict[str, float]
    used: tuple[bool, ...]
    leave: bool
    regroup: bool
    again: bool
    lost: bool = False
    written: bool = False
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
        written: its script has written to weights that workers share, which it sees by itself alone.
        digest: a digest (64 bits) of the weights with which its shards were computed; 0 if nobody compares weights.
        own: a digest (64 bits) of the state that no other worker holds; 0 if nobody compares it.
        timings: the times that it measured.
        balance: the words of partial sums that it wrote, less those that it read.
    """

    leave: bool = False
    regroup: bool = False
    again: bool = False
    lost: bool = False
    flipped: bool = False
    written: bool = False
    digest: int = 0
    own: int = 0
    timings: Timings = field(default_factory=Timings)
    balance: Balance = field(default_factory=Balance)


@dataclass(frozen=True, slots=True)
class ControlWord:
    """Packs one worker's part of the control word, and reads everybody's.

    A word is 1-D float64 of the same length on every worker: flags, then a row per shard (as many as the
    widest worker has), then one bit per tensor. Bits travel as bytes: nothing computes with them.
    """

    split: Split
    tensors: int

    @property
    def length(self) -> int:
        """Bytes of one worker's word."""
        return 8 * (_HEADER + self.split.widest * _ROW) + -(-self.tensors // 8)

    def pack(self, reports: Sequence[ShardReport], used: Sequence[bool], flags: Flags) -> torch.Tensor:
        """This worker's word: uint8, 1-D of ``length``.

        Raises:
            LossError: more metrics than a control word has room for.
        """
        numbers = np.zeros(_HEADER + self.split.widest * _ROW)
        numbers[:_FLAGS] = (
            flags.leave,
            flags.regroup,
            flags.again,
            flags.lost,
            flags.flipped,
            flags.written,
        )
        numbers.view(np.uint64)[_DIGESTS] = flags.digest, flags.own
        numbers[_TOLD:_BALANCE] = astuple(flags.timings)
        balance, copies = flags.balance
        numbers.view(np.uint64)[_BALANCE:_HEADER] = balance % MODULUS, copies % PRIME
        for row, report in zip(numbers[_HEADER:].reshape(-1, _ROW), reports, strict=False):
            _fill(row, report)
        bits = np.packbits(np.asarray(used, dtype=bool))
        return torch.from_numpy(np.concatenate([numbers.view(np.uint8), bits]))

    def read(self, words: torch.Tensor, names: Sequence[str]) -> StepReport:
        """What all workers' words, of shape (world size, length), say together.

        Args:
            words: the control words, uint8 of shape (world size, length).
            names: the metrics that this worker's shards logged.

        Raises:
            LossError: shards logged different metrics.
        """
        numbers = self._numbers(words)
        bits = np.bitwise_or.reduce(words.numpy()[:, numbers.shape[1] * 8 :], axis=0)
        used = np.unpackbits(bits, count=self.tensors).astype(bool)
        rows = [row for rank in range(self.split.workers) for row in self._rows(numbers, rank)]
        shards = tuple(_report(row, shard, names) for shard, row in enumerate(rows))
        weight = _total([report.weight for report in shards])
        loss = _mean([(report.loss, report.weight) for report in shards], weight)
        metrics = {
            name: _mean([(report.metrics.get(name, 0.0), report.weight) for report in shards], weight) for name in names
        }
        leave, regroup, again, lost, _, written = (bool(numbers[:, flag].any()) for flag in range(_FLAGS))
        kept = is_balanced(*zip(*_balances(numbers), strict=True))
        return StepReport(
            shards, loss, weight, metrics, tuple(used.tolist()), leave, regroup, again, lost, written, kept
        )

    def flags(self, words: torch.Tensor) -> tuple[Flags, ...]:
        """What each worker said, by rank."""
        numbers = self._numbers(words)
        digests = numbers.view(np.uint64)[:, _DIGESTS].tolist()
        rows = zip(numbers[:, :_BALANCE].tolist(), digests, _balances(numbers), strict=True)
        return tuple(_flags(row, told, balance) for row, told, balance in rows)

    def has_silent_worker(self, words: torch.Tensor) -> bool:
        """Whether some worker had nothing but empty shards, or none, and so cannot know which metrics were logged."""
        numbers = self._numbers(words)
        return any(not self._rows(numbers, rank)[:, 1].any() for rank in range(self.split.workers))

    def logged(self, words: torch.Tensor) -> float | None:
        """Tells which metrics the first shard that is not empty has logged; None if all are."""
        numbers = self._numbers(words)
        rows = (row for rank in range(self.split.workers) for row in self._rows(numbers, rank))
        return next((float(row[_FIXED - 1]) for row in rows if row[1]), None)

    def _numbers(self, words: torch.Tensor) -> _Words:
        return np.ascontiguousarray(words.numpy()[:, : 8 * (_HEADER + self.split.widest * _ROW)]).view(np.float64)

    def _rows(self, numbers: _Words, rank: int) -> _Words:
        rows: _Words = numbers[rank, _HEADER:].reshape(-1, _ROW)[: len(self.split.of(rank))]
        return rows


_ROW = _FIXED + MAX_METRICS


def _balances(numbers: _Words) -> list[Balance]:
    return [Balance(*row) for row in numbers.view(np.uint64)[:, _BALANCE:_HEADER].tolist()]


def _flags(header: Sequence[float], digests: Sequence[int], balance: Balance) -> Flags:
    leave, regroup, again, lost, flipped, written = (bool(flag) for flag in header[:_FLAGS])
    digest, own = digests
    return Flags(leave, regroup, again, lost, flipped, written, digest, own, Timings(*header[_TOLD:]), balance)


def _fill(row: _Words, report: ShardReport) -> None:
    if len(report.metrics) > MAX_METRICS:
        raise LossError(f"{len(report.metrics)} metrics logged in one loss function: at most {MAX_METRICS} fit")
    row[:_FIXED] = report.loss, report.weight, report.squared_norm, signature_of(report.metrics)
    for number, name in enumerate(sorted(report.metrics)):
        row[_FIXED + number] = report.metrics[name]


def _report(row: _Words, shard: int, names: Sequence[str]) -> ShardReport:
    loss, weight, squared_norm, signature = row[:_FIXED].tolist()
    if weight == 0:
        return ShardReport()
    if signature != signature_of(names):
        logged = ", ".join(sorted(names)) or "nothing"
        raise LossError(
            f"shard {shard} logged other metrics than this worker's shards ({logged}): "
            f"call run.log with the same names in every call of the loss function"
        )
    values = row[_FIXED : _FIXED + len(names)].tolist()
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
