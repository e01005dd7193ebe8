"""Comparisons of workers in each step: digests of their weights, and shards that others compute again (audits)."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from zlib import crc32

from unisono.errors import MemoryFault
from unisono.plan.audits import AuditResult, audited, auditors, judged_audit
from unisono.train.group.membership import Verdict
from unisono.train.group.workers import Workers
from unisono.train.model.at_rest import AtRest, MemoryState, tensors_of
from unisono.train.model.update import settings_digest
from unisono.train.recovery.integrity import HeldStates, Integrity, Note, judged, nothing
from unisono.train.step.gradient_parts import MemoryChecks
from unisono.train.step.part import Attempt, Back, EngineBase, Hearing, Part
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Call
from unisono.train.step.word import Field
from unisono.words import MODULUS

# Digests of the weights that each worker computes with, compared before anything is committed.


class StateDigests(Part):
    """Finds out that a worker computes with other weights than most, or with weights that have changed by themselves.

    If there is only one worker, nobody else has its weights. So it looks once everything is worked out, right before
    the update.

    Attributes:
        looks_last: whether this is the only worker, and looks: then ``confirm`` judges.
    """

    fields = (
        Field("lost", "?", "each", "any"),
        Field("flipped", "?", "each", "any"),
        Field("digest", "Q", "each", "sum", MODULUS),
        Field("amiss", "Q", "each", "sum", MODULUS),
    )

    def __init__(self, integrity: Integrity, memory: MemoryChecks) -> None:
        self._integrity, self._memory = integrity, memory
        self._at_rest: AtRest | None = None
        self.looks_last = False
        self._note: Note = nothing

    def join(self, base: EngineBase) -> None:
        """Begin in a generation."""
        weights, optimizer_state = list(base.prepared.weights().values()), partial(tensors_of, base.prepared.optimizers)
        self._prepared, looks = base.prepared, base.execution.looks
        self._at_rest = AtRest(weights, base.buffers, optimizer_state, is_only=base.is_only) if looks else None
        self.looks_last = base.is_only and looks

    def leave(self) -> None:
        """End the generation."""
        self._at_rest = None

    def step_begins(self) -> None:
        """Note that a step begins: from now on only updates and the script change the state."""
        if self._at_rest is not None:
            self._at_rest.first()

    @property
    def has_flipped(self) -> bool:
        """Whether a bit has changed since the last update, where this worker has the only copy."""
        return self._at_rest is not None and self._at_rest.has_changed()

    def begin(self, call: Call) -> None:
        """Note the state at the beginning of a call: the update before has left it, or the script has written it."""
        if self._at_rest is not None:
            self._at_rest.begin()

    def ask(self, attempt: Attempt) -> None:
        """Look at what the shards were computed with. The only worker looks here as well, if shards are audited."""
        is_early = not self.looks_last or bool(attempt.audited)
        self._pending = self._start_look() if is_early else MemoryState

    def tell(self, attempt: Attempt) -> tuple[bool, bool, int, int]:
        """Return what was found."""
        memory = self._pending()
        return self._memory.has_lost, memory.has_flipped, memory.digest, memory.amiss

    def hear(
        self,
        attempt: Attempt,
        lost: Sequence[bool],
        flipped: Sequence[bool],
        digests: Sequence[int],
        amiss: Sequence[int],
    ) -> Hearing | None:
        """Take what all workers have found.

        Audits of the shards are pointless if a worker has computed with wrong weights: its processor is not to blame.
        """
        self._lost, self._held = lost, HeldStates(digests, flipped, amiss)
        return Hearing.ENOUGH if True in lost or judged(self._held) is not Verdict.RIGHT else None

    def look(self, attempt: Attempt) -> None:
        """Start the last look, if this worker is the only one."""
        if self.looks_last:
            self._pending = self._start_look()

    def judge(self, attempt: Attempt) -> Hearing | Back | None:
        """Judge whether all workers have computed with the same."""
        return None if self.looks_last else self._judged(attempt)

    def confirm(self, attempt: Attempt) -> Hearing | Back | None:
        """Judge whether the only worker has computed with what the update before has left."""
        memory = (self._start_look() if attempt.trouble else self._pending)()
        self._held = HeldStates([memory.digest], [self._held.flipped[0] or memory.has_flipped], [memory.amiss])
        return self._judged(attempt)

    def _judged(self, attempt: Attempt) -> Hearing | Back | None:
        place = attempt.call.step, attempt.call.number
        inputs = self._inputs(attempt) if self._integrity.is_on else ()
        verdict, self._note = self._integrity.judge(place, self._held, inputs, self._lost)
        if verdict is Verdict.RIGHT:
            return None
        return Hearing.HEAL if verdict is Verdict.HEALING else Back(self._note)

    def is_faulty(self) -> bool:
        """Whether a bit of the only worker has flipped."""
        return self.looks_last and self.has_flipped

    def done(self, attempt: Attempt) -> None:
        """Note the state, which stays as it is until the next update."""
        if self._at_rest is not None:
            self._at_rest.note()

    def note(self, attempt: Attempt) -> None:
        """Apply what was judged."""
        self._note()

    def _start_look(self) -> Callable[[], MemoryState]:
        return MemoryState if self._at_rest is None else self._at_rest.look()

    def _inputs(self, attempt: Attempt) -> list[int]:
        """Digests of settings, limits and the loss, which have to be the same when the call is computed again."""
        values = (attempt.call.clip, attempt.report.loss)
        return [settings_digest(self._prepared.optimizers), *[crc32(repr(value).encode()) for value in values]]


# Audits: other workers compute some shards again, and a worker that computes wrongly is replaced.


class Audits(Part):
    """Finds workers that compute wrongly: other workers compute some of their shards again.

    ``share`` is that of all shards, from 0 to 1.
    """

    measures = True

    def __init__(self, seed: int, share: float) -> None:
        self._seed, self._share = seed, share
        self._results: tuple[AuditResult, ...] = ()
        self._note: Note = nothing

    def report(self, result: AuditResult) -> None:
        """Report a result at once. Collective."""

    def judged(self, workers: Workers, results: Sequence[AuditResult]) -> tuple[Note, list[int]]:
        """Return what follows from the results of a call, and which workers compute wrongly. Collective."""
        return nothing, []

    def join(self, base: EngineBase) -> None:
        """Begin in a generation."""
        self._workers, self._buffers = base.workers, base.buffers

    def begin(self, call: Call) -> None:
        """Forget the results of the call before."""
        self._results, self._note = (), nothing

    def attempt(self, attempt: Attempt) -> None:
        """Draw shards, the same on every worker, whose results will be marked."""
        call, batch, split = attempt.call, attempt.call.batch, self._workers.transport.split
        drawn = set(audited(self._seed, self._share, call.step, call.number, batch.shards))
        if call.is_last:  # at least one shard of every worker
            owned = [[shard for shard in split.of(rank) if len(batch.shard(shard))] for rank in range(split.workers)]
            drawn.update(shards[0] for shards in owned if shards)
        attempt.audited = tuple(shard for shard in sorted(drawn) if len(batch.shard(shard)))

    def hear(self, attempt: Attempt) -> Hearing | None:
        """Have other workers compute the drawn shards again. Collective; the results of the attempt stay."""
        own_digests = {
            shard.number: shard.mark.finish(shard.report, self._buffers.result(shard.number))
            for shard in attempt.shards
            if shard.mark is not None
        }
        results = self.examine(attempt.call.step, attempt.audited, own_digests, attempt.again)
        for result in results:
            self.report(result)
        self._results += results
        return Hearing.AGAIN if any(result.is_transient for result in results) else None

    def judge(self, attempt: Attempt) -> Back | None:
        """Have workers that compute wrongly leave."""
        self._note, wrong = self.judged(self._workers, self._results)
        return Back(self._note, wrong) if wrong else None

    def note(self, attempt: Attempt) -> None:
        """Apply what was judged."""
        self._note()

    def examine(
        self, step: int, shards: Sequence[int], own: Mapping[int, str], compute: Callable[[int], str]
    ) -> tuple[AuditResult, ...]:
        """Compute again the shards that this worker audits, and compare all results. Collective.

        ``own`` are digests of the shards that this worker has computed anyway; ``compute`` computes a shard again, and
        returns its digest.

        Raises:
            MemoryFault: results differ, and nobody can say whose are right.
        """
        if not shards:
            return ()
        rank, own_digests = self._workers.rank, {shard: [digest] for shard, digest in own.items() if shard in shards}
        roles = {shard: self._roles(step, shard) for shard in shards}
        self._compute([shard for shard in shards if roles[shard][1] == rank], own_digests, compute)
        results = self._gathered(shards, own_digests)
        undecided = [shard for shard in shards if judged_audit(shard, results[shard]) is None]
        if undecided:  # their owners and auditors compute them once more
            self._compute([shard for shard in undecided if rank in roles[shard]], own_digests, compute)
            results = self._gathered(shards, own_digests)
        findings = {shard: judged_audit(shard, results[shard]) for shard in shards}
        for shard, finding in findings.items():
            if finding is None:
                self._undecided(step, shard, results[shard])
        return tuple(finding for finding in findings.values() if finding is not None)

    def _roles(self, step: int, shard: int) -> tuple[int, int, int]:
        owner = self._workers.transport.split.owner(shard)
        return (owner, *auditors(owner, self._workers.world_size, step, shard))

    def _compute(self, shards: Sequence[int], own: dict[int, list[str]], compute: Callable[[int], str]) -> None:
        for shard in shards:
            own.setdefault(shard, []).append(compute(shard))

    def _gathered(self, shards: Sequence[int], own: Mapping[int, list[str]]) -> dict[int, dict[int, list[str]]]:
        everybody = self._workers.gather_json({str(shard): results for shard, results in own.items()})
        return {
            shard: {rank: digests[str(shard)] for rank, digests in enumerate(everybody) if str(shard) in digests}
            for shard in shards
        }

    def _undecided(self, step: int, shard: int, digests: Mapping[int, list[str]]) -> None:
        hosts = self._workers.gather_json(platform.node())
        results = ", ".join(f"rank {rank} on host {hosts[rank]}: {'/'.join(digests[rank])}" for rank in sorted(digests))
        raise MemoryFault(
            f"step {step}: shard {shard} was computed more than once, with different results ({results}), and it "
            f"cannot be decided which is right. A processor or the memory of one of these hosts is broken, or the loss "
            f"function draws on something that is not the same everywhere. With three workers or more it is found out "
            f"who is wrong"
        )


class JudgedAudits(Audits):
    """Judges which workers compute wrongly, and has others take their place."""

    def __init__(self, run: RunBase, integrity: Integrity) -> None:
        super().__init__(run.config.job.seed, run.config.execution.audit)
        self._membership, self._trained, self._checkpoints = run.membership, run.trained, run.checkpoints
        self._listeners, self._integrity = run.listeners, integrity

    def report(self, result: AuditResult) -> None:
        """Report the result of an audit. Collective. What follows from it comes with the call's change."""
        if result.wrong is None:
            return
        host = self._membership.workers.gather_json(platform.node())[result.wrong]
        step = self._trained.progress.position.step
        self._listeners.wrong_result(step, result, host)

    def judged(self, workers: Workers, results: Sequence[AuditResult]) -> tuple[Note, list[int]]:
        """Return what follows from the audits of a call, and which workers compute wrongly. Collective.

        Raises:
            MemoryFault: a worker does, and the workers of this job stay the same; or there is no state to go back to.
        """
        servers = workers.transport.split.servers
        computing = [rank for rank in range(workers.world_size) if rank not in servers]
        proofs = [result for result in results if result.is_proof]
        wrong = sorted({result.wrong for result in proofs if result.wrong is not None})
        if not wrong:
            return self._integrity.audited(results, computing), []
        host = workers.gather_json(platform.node())[wrong[0]]
        why = (
            f"step {self._trained.progress.position.step}: rank {wrong[0]} on host {host} computed shard "
            f"{proofs[0].shard} otherwise than the others, every time, so its processor or its memory is broken"
        )
        self.discard_unconfirmed()
        if not self._membership.is_elastic:
            raise MemoryFault(
                f"{why}. Start the job again without that host: checkpoints that may be wrong are removed"
            )
        return self._integrity.audited(results, computing, why), wrong

    def discard_unconfirmed(self) -> None:
        """Remove checkpoints that a worker that computes wrongly may have spoilt, so that no job resumes from them."""
        if (step := self._integrity.confirmed) is not None:
            self._checkpoints.discard_after(step)
