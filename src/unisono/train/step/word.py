"""The control word: what every worker sends all others once per step, beside the gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from struct import Struct
from typing import Any, Literal

import numpy as np
import torch

from unisono.errors import JobError, LossError
from unisono.plan.split import Split
from unisono.plan.tree import total
from unisono.received import short
from unisono.train.group.workers import Workers

Combine = Literal["any", "sum", "each"]
WAYS: dict[Combine, Callable[[Sequence[Any]], Any]] = {"any": any, "sum": sum, "each": tuple}

FORMS: dict[str, Callable[[Any], Any]] = {"?": bool, "d": float, "Q": int}
MEANINGS = {"?": "true or false", "d": "a number", "Q": "a whole number from 0 to 2**64 - 1"}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the control word: a value that each worker sends all others once in every step.

    Attributes:
        name: the name of the field, for messages.
        form: the form of the value, as in ``struct``: a bool, a float of 64 bits, or 64 bits without sign.
        combine: the combination that a part hears: whether any worker's value is true, the sum of all values, or each
            worker's value, by rank.
        devices: the combination for the devices of one worker, by default the same; with ``each``, the first device's
            value counts.
        modulus: the modulus of sums; 0 for none.
    """

    name: str
    form: Literal["?", "d", "Q"] = "?"
    combine: Combine = "any"
    devices: Combine | None = None
    modulus: int = 0

    def __post_init__(self) -> None:
        if self.form not in FORMS or {self.combine, self.devices or self.combine} - set(WAYS):
            raise JobError(f"{self}: a form is one of {', '.join(FORMS)}, and a combination one of {', '.join(WAYS)}")

    def value_of(self, value: Any, about: str) -> Any:
        """The value in the form in which it travels.

        Args:
            value: a value, or a tensor with one element.
            about: the part and method that it comes from, for errors.

        Raises:
            JobError: it has no such form.
        """
        try:
            result = FORMS[self.form](value)
            if self.form != "Q" or (result == value and 0 <= result < 2**64):
                return result
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
        raise JobError(f"{about}: field {self.name} is {short(value)}: its form {self.form!r} is {MEANINGS[self.form]}")

    @property
    def of_workers(self) -> Callable[[Sequence[Any]], Any]:
        """A function that combines the values of workers, by rank, to what a part hears."""
        return self._by(self.combine)

    @property
    def of_devices(self) -> Callable[[Sequence[Any]], Any]:
        """A function that combines the values of a worker's devices to the worker's value."""
        how = self.devices or self.combine
        return itemgetter(0) if how == "each" else self._by(how)

    def _by(self, how: Combine) -> Callable[[Sequence[Any]], Any]:
        if how == "sum" and self.modulus:
            return lambda values: sum(values) % self.modulus
        return WAYS[how]


MAX_METRICS = 16
"""The largest number of metrics that a loss function may log, since the control word has a fixed size."""

_FIXED = 4  # loss, weight, squared norm, signature of the metrics' names
_ROW = _FIXED + MAX_METRICS
_NO_METRICS = [0.0] * MAX_METRICS

_Row = Sequence[float]


@dataclass(slots=True)
class ShardReport:
    """The result of one shard.

    Attributes:
        loss: the mean over the shard's samples (or tokens).
        weight: the number of its samples (or tokens); 0 for an empty shard.
        metrics: further means, weighted alike.
        squared_norm: the squared norm of the gradient of the loss; 0 if it is not measured.
    """

    loss: float = 0.0
    weight: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    squared_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of the whole step: the same on every worker, and for every number of workers.

    Attributes:
        shards: one report per shard, in order; their metrics have the names that this worker's shards logged.
        loss: the weighted mean.
        weight: the sum of the shards' weights.
        metrics: the weighted means.
        used: one flag per tensor in question: whether any shard used it.
    """

    shards: tuple[ShardReport, ...]
    loss: float
    weight: float
    metrics: dict[str, float]
    used: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ControlWords:
    """The control words of all workers.

    Attributes:
        values: the values that workers have sent, by field and rank.
        rows: the numbers of each shard, in order.
        used: one flag per tensor: whether any worker's shard used it.
    """

    values: Sequence[Sequence[Any]]
    rows: Sequence[_Row]
    used: tuple[bool, ...]

    @property
    def logged(self) -> float | None:
        """The signature of the metrics that the first shard with a weight has logged; None if all shards have none."""
        for row in self.rows:
            if row[1]:
                return row[_FIXED - 1]
        return None

    def has_silent_worker(self, split: Split) -> bool:
        """Whether some worker had no shard with a weight, and so cannot know which metrics were logged."""
        weights = [row[1] for row in self.rows]
        return any(not any(weights[start:stop]) for start, stop in pairwise(split.bounds))

    def read(self, names: Sequence[str]) -> StepReport:
        """Combine all control words. ``names`` are the metrics that this worker's shards logged.

        Raises:
            LossError: shards logged different metrics.
        """
        names, signature = sorted(names), signature_of(tuple(names))
        shards = []
        for shard, (loss, weight, squared_norm, logged, *means) in enumerate(self.rows):
            if weight == 0:
                shards.append(ShardReport())
                continue
            if logged != signature:
                raise LossError(
                    f"shard {shard} logged other metrics than this worker's shards ({', '.join(names) or 'nothing'}): "
                    f"call run.log with the same names in every call of the loss function"
                )
            shards.append(ShardReport(loss, weight, dict(zip(names, means, strict=False)), squared_norm))
        weights = [report.weight for report in shards]
        weight = total(weights)
        loss = _mean([report.loss for report in shards], weights, weight)
        metrics = {name: _mean([report.metrics.get(name, 0.0) for report in shards], weights, weight) for name in names}
        return StepReport(tuple(shards), loss, weight, metrics, self.used)


class ControlWord:
    """Packs this worker's control word, and opens those of all workers.

    A word is a row of bytes of the same length on every worker: the fields of the parts of a step that are on, then
    numbers for each shard (as many as the worker with most shards has), then one bit per tensor.
    """

    def __init__(self, split: Split, tensors: int, fields: Sequence[Field]) -> None:
        self._split, self._tensors, self._fields = split, tensors, len(fields)
        self._rows = split.widest
        self._form = Struct(f"<{''.join(field.form for field in fields)}{self._rows * _ROW}d")
        self.length = self._form.size + -(-tensors // 8)
        self._used: tuple[bytes, tuple[bool, ...]] = b"", ()

    def pack(self, values: Sequence[Any], reports: Sequence[ShardReport], used: Sequence[bool]) -> torch.Tensor:
        """This worker's word: a uint8 tensor of one dimension with ``length`` elements.

        Raises:
            LossError: a shard has more metrics than there is room for.
        """
        rows: list[float] = []
        for report in reports:
            rows += row_of(report)
        rows += [0.0] * (self._rows * _ROW - len(rows))
        packed = bytearray(self._form.pack(*values, *rows))
        packed += np.packbits(np.array(used, dtype=bool)).tobytes()
        return torch.frombuffer(packed, dtype=torch.uint8)

    def open(self, words: torch.Tensor) -> ControlWords:
        """Unpack the words of all workers, a tensor of the shape (world size, length)."""
        rows = np.ascontiguousarray(words.numpy())
        unpacked = [self._form.unpack_from(row) for row in rows]
        numbers = []
        for word, (start, stop) in zip(unpacked, pairwise(self._split.bounds), strict=True):
            starts = range(self._fields, self._fields + (stop - start) * _ROW, _ROW)
            numbers += [word[first : first + _ROW] for first in starts]
        used = np.bitwise_or.reduce(rows[:, self._form.size :], axis=0)
        # The flags are the same in most steps, and unpacking them takes longer than comparing them.
        if (bits := used.tobytes()) != self._used[0] or not self._used[1]:
            self._used = bits, tuple(np.unpackbits(used, count=self._tensors).astype(bool).tolist())
        return ControlWords(list(zip(*unpacked, strict=True))[: self._fields], numbers, self._used[1])


class ReportExchange:
    """Exchanges the shards' results between the workers of a generation, and finds the names of metrics.

    A word has only a signature of the names. A worker without shards asks the others for the names, once.
    """

    def __init__(self, workers: Workers, fields: Sequence[Field]) -> None:
        self._workers, self._fields = workers, fields
        self._names: dict[float, list[str]] = {signature_of(()): []}
        self._words: dict[tuple[Split, int], ControlWord] = {}

    def send_and_receive(
        self, values: Sequence[Any], reports: Sequence[ShardReport], used: Sequence[bool]
    ) -> tuple[StepReport, Sequence[Sequence[Any]]]:
        """Send this worker's results to all others, and receive theirs. Collective.

        ``used`` says of each tensor whether these shards have used it.

        Returns:
            the result of the step, and for each field the values of all workers.
        """
        split, transport = self._workers.transport.split, self._workers.transport
        if transport.world_size == 1:  # there is no other worker to exchange words with
            alone = ControlWords([(value,) for value in values], [*map(row_of, reports)], tuple(used))
            return alone.read(self._names_of(reports) or []), alone.values
        if (word := self._words.get(key := (split, len(used)))) is None:
            word = self._words[key] = ControlWord(split, len(used), self._fields)
        words = word.open(transport.all_gather(word.pack(values, reports, used)))
        names, logged = self._names_of(reports), words.logged
        if logged is not None and (names is None or logged not in self._names) and words.has_silent_worker(split):
            if logged not in self._names:  # on all workers or on none: all have seen the same words
                names_by_rank = self._workers.gather_json(names)
                self._names[logged] = next(metrics for metrics in names_by_rank if metrics is not None)
            names = self._names[logged] if names is None else names
        return words.read(names or []), words.values

    def _names_of(self, reports: Sequence[ShardReport]) -> list[str] | None:
        """The metrics that this worker's shards have logged; None if all of them are empty."""
        for report in reports:
            if report.weight:
                return sorted(report.metrics)
        return None


def row_of(report: ShardReport) -> list[float]:
    """The numbers of a shard, the same count for any shard."""
    if not report.metrics:
        return [report.loss, report.weight, report.squared_norm, signature_of(()), *_NO_METRICS]
    if len(report.metrics) > MAX_METRICS:
        raise LossError(f"{len(report.metrics)} metrics logged in one loss function: at most {MAX_METRICS} fit")
    names = sorted(report.metrics)
    logged = [report.metrics[name] for name in names] + _NO_METRICS[len(names) :]
    return [report.loss, report.weight, report.squared_norm, signature_of(tuple(names)), *logged]


@lru_cache(256)
def signature_of(metrics: Iterable[str]) -> float:
    """A number that stands for these names."""
    digest = hashlib.blake2b("\n".join(sorted(metrics)).encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "little"))


def _mean(values: Sequence[float], weights: Sequence[float], weight: float) -> float:
    if weight == 0:
        return float("nan")
    return total([value * share if share else 0.0 for value, share in zip(values, weights, strict=True)]) / weight
