"""Audits: some shards are computed again by other workers, and what comes of it is compared bit for bit."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from unisono.errors import MemoryFault
from unisono.plan.audits import AuditResult, audited, auditors, judged
from unisono.plan.batches import Batch
from unisono.train.group.control import ShardReport
from unisono.train.group.workers import Workers
from unisono.words import MODULUS, is_dense, sum_of_words

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no bit of a sum is lost by it


class ShardDigest:
    """A digest of everything that a shard comes to: its gradient, its loss and metrics, and its buffers."""

    def __init__(self) -> None:
        self._sum = 0

    def take(self, number: int, gradient: Tensor | None) -> None:
        """Take a parameter's gradient. The order of parameters does not matter."""
        words = 0 if gradient is None else 1 + sum_of_words(in_memory_order(gradient))
        self._sum = (self._sum + _FACTOR * (2 * number + 1) * words) % MODULUS

    def finish(self, report: ShardReport, buffers: Sequence[Tensor | None]) -> str:
        """The digest, in hex, once all gradients were taken."""
        kept = [None if one is None else sum_of_words(in_memory_order(one)) for one in buffers]
        numbers = [report.loss, report.weight, *(report.metrics[name] for name in sorted(report.metrics))]
        said = [self._sum, kept, [float(number).hex() for number in numbers]]
        return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()


def in_memory_order(tensor: Tensor) -> Tensor:
    """A tensor's elements in the order in which they lie in memory, if nothing lies in between."""
    if is_dense(tensor):
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    return tensor.detach().reshape(-1)


class Audit:
    """Finds workers that compute wrongly: other workers compute some of their shards again.

    Args:
        seed: the job's seed.
        share: the share of all shards that is computed again, from 0 to 1.
        workers: the workers of this generation.
    """

    def __init__(self, seed: int, share: float, workers: Workers) -> None:
        self._seed, self._share, self._workers = seed, share, workers

    def drawn(self, step: int, call: int, batch: Batch, *, is_last: bool = False) -> tuple[int, ...]:
        """The shards that are audited in a call, the same on every worker.

        Args:
            step: the number of the step in the job.
            call: the number of the call in the step.
            batch: the global batch.
            is_last: whether the loop ends with this step: then one shard of every worker is audited at least.
        """
        if not self._share:
            return ()
        found = set(audited(self._seed, self._share, step, call, batch.shards))
        if is_last:
            split = self._workers.transport.split
            owned = [[shard for shard in split.of(rank) if len(batch.shard(shard))] for rank in range(split.workers)]
            found.update(shards[0] for shards in owned if shards)
        return tuple(shard for shard in sorted(found) if len(batch.shard(shard)))

    def examine(
        self, step: int, shards: Sequence[int], own: Mapping[int, str], compute: Callable[[int], str]
    ) -> tuple[AuditResult, ...]:
        """Compute the shards that are this worker's to audit, and compare. Collective.

        Args:
            step: the number of the step in the job.
            shards: the numbers of the audited shards.
            own: digests of the shards that this worker has computed anyway, by shard.
            compute: a function that computes a shard again, and returns its digest.

        Raises:
            MemoryFault: results differ, and nobody can say whose are right.
        """
        if not shards:
            return ()
        rank, known = self._workers.rank, {shard: [digest] for shard, digest in own.items() if shard in shards}
        roles = {shard: self._roles(step, shard) for shard in shards}
        self._compute([shard for shard in shards if roles[shard][1] == rank], known, compute)
        told = self._told(shards, known)
        open_ones = [shard for shard in shards if judged(shard, told[shard]) is None]
        if open_ones:  # everybody who has to do with one computes it once more
            self._compute([shard for shard in open_ones if rank in roles[shard]], known, compute)
            told = self._told(shards, known)
        found = {shard: judged(shard, told[shard]) for shard in shards}
        for shard, finding in found.items():
            if finding is None:
                self._undecided(step, shard, told[shard])
        return tuple(finding for finding in found.values() if finding is not None)

    def _roles(self, step: int, shard: int) -> tuple[int, int, int]:
        owner = self._workers.transport.split.owner(shard)
        return (owner, *auditors(owner, self._workers.world_size, step, shard))

    def _compute(self, shards: Sequence[int], known: dict[int, list[str]], compute: Callable[[int], str]) -> None:
        for shard in shards:
            known.setdefault(shard, []).append(compute(shard))

    def _told(self, shards: Sequence[int], known: Mapping[int, list[str]]) -> dict[int, dict[int, list[str]]]:
        everybody = self._workers.gather_json({str(shard): results for shard, results in known.items()})
        return {
            shard: {rank: told[str(shard)] for rank, told in enumerate(everybody) if str(shard) in told}
            for shard in shards
        }

    def _undecided(self, step: int, shard: int, told: Mapping[int, list[str]]) -> None:
        hosts = self._workers.gather_json(platform.node())
        listed = ", ".join(f"rank {rank} on host {hosts[rank]}: {'/'.join(told[rank])}" for rank in sorted(told))
        raise MemoryFault(
            f"step {step}: shard {shard} was computed more than once, with other results ({listed}), and they do not "
            f"say who is right. A processor or the memory of one of these hosts is broken, or the loss function draws "
            f"on something that is not the same everywhere. With three workers or more it is found out who is wrong"
        )
