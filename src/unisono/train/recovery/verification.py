"""Comparing the whole state at boundaries, and what follows from that and from audits."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial

from unisono.checkpoint.snapshot import Digests
from unisono.checkpoint.store import Snapshot
from unisono.errors import JobMismatch, MemoryFault
from unisono.plan.audits import Finding
from unisono.train.group.collectives import Change, CollectiveCalls
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.recovery.integrity import Integrity, Note
from unisono.train.recovery.recovery import Snapshots
from unisono.train.state.checkpoints import Checkpoints
from unisono.train.state.trained import Trained
from unisono.train.step.current import CurrentSteps
from unisono.train.step.listeners import Listeners


class AuditJudge:
    """Says which workers compute wrongly.

    Args:
        membership: who trains.
        trained: where the run stands.
        integrity: knows which states audits have confirmed.
        checkpoints: of which some may be wrong.
        listeners: who is told.
    """

    def __init__(
        self,
        membership: Membership,
        trained: Trained,
        integrity: Integrity,
        checkpoints: Checkpoints,
        listeners: Listeners,
    ) -> None:
        self._membership, self._trained, self._integrity = membership, trained, integrity
        self._checkpoints, self._listeners = checkpoints, listeners

    def found(self, finding: Finding) -> None:
        """Tell what an audit has come to. Collective; what follows from it comes with the call's change."""
        if finding.wrong is None:
            return
        host = self._membership.workers.gather_json(platform.node())[finding.wrong]
        step = self._trained.progress.position.step
        self._listeners.tell(lambda one: one.wrong_result(step, finding, host))

    def judged(
        self, workers: Workers, findings: Sequence[Finding], discard: Callable[[], None]
    ) -> tuple[Note, list[int]]:
        """What follows from the audits of a call, and which workers compute wrongly. Collective.

        Args:
            workers: of this generation.
            findings: of the call.
            discard: gives up what was computed; called if it may be wrong.

        Raises:
            MemoryFault: one does, and the workers of this job stay the same; or there is no state to go back to.
        """
        servers = workers.transport.split.servers
        computing = [rank for rank in range(workers.world_size) if rank not in servers]
        proofs = [finding for finding in findings if finding.is_proof]
        wrong = sorted({finding.wrong for finding in proofs if finding.wrong is not None})
        if not wrong:
            return self._integrity.audited(findings, computing), []
        discard()
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
        return self._integrity.audited(findings, computing, why), wrong

    def discard_unconfirmed(self) -> None:
        """Whoever starts the job again must not go on from what a worker that computes wrongly has left."""
        if (step := self._integrity.confirmed) is not None:
            self._checkpoints.discard_after(step)


class Verification:
    """Verifies the state of a run between its steps.

    Args:
        collectives: the collective calls.
        membership: who trains.
        steps: who computes.
        trained: the state.
        integrity: compares it.
        judge: knows which checkpoints are not to be believed.
        snapshots: settles the state before it is compared.
        listeners: who is told.
    """

    def __init__(
        self,
        collectives: CollectiveCalls,
        membership: Membership,
        steps: CurrentSteps,
        trained: Trained,
        integrity: Integrity,
        judge: AuditJudge,
        snapshots: Snapshots,
        listeners: Listeners,
    ) -> None:
        self._collectives, self._membership, self._steps, self._trained = collectives, membership, steps, trained
        self._integrity, self._judge, self._snapshots, self._listeners = integrity, judge, snapshots, listeners

    def verify(self) -> Digests | None:
        """Compare the whole state, and keep it if it is right.

        Returns:
            what all agree on; nothing if the state is doubted, or nothing is compared.
        """
        self._snapshots.settle()
        if not self._integrity.is_on:
            return None
        step = self._trained.progress.position.step
        # What stands before a loop that goes on later is no state to keep: the rest of it is yet to be restored.
        weights_only = self._steps.has_own_weights or self._trained.restored is not None

        def compare(workers: Workers) -> Change[Digests]:
            heal = self._collectives.recovery.heal
            return self._integrity.compare(workers, step, heal, self._has_flipped, weights_only=weights_only)

        digests = self._collectives.change(compare)
        if self._trained.is_doubted:
            return None
        if not weights_only:
            self._integrity.copy(step, -1 if self._membership.joins else self._membership.workers.rank)
        return digests

    def require_right(self) -> Digests | None:
        """Compare the whole state outside of steps, where nothing can be computed again.

        Raises:
            JobMismatch: the workers hold different states, and nobody can say who is right.
        """
        verified = self.verify()
        if (doubt := self._trained.doubt) is not None:
            raise JobMismatch(f"{doubt.why}: start the job again, it goes on from its newest verified checkpoint")
        return verified

    def require_whole(self, rank: int) -> None:
        """Refuse weights that were updated by halves, or by a wrong gradient that no comparison can find.

        Raises:
            MemoryFault: an update of this worker was made from a gradient that memory had not kept.
            WorkerLost: a worker was lost in the middle of an update.
        """
        self._steps.require_whole()
        if self._steps.has_lost and not self._integrity.is_on:
            raise MemoryFault(
                f"rank {rank} made an update from a gradient that memory had not kept, so the weights are "
                f"wrong: start the job again, it goes on from its last checkpoint"
            )

    def go_back(self) -> None:
        """The state is doubted: go on from the newest one that was right."""
        doubt, reached = self._trained.doubt, self._trained.progress.position.step
        assert doubt is not None, "there is a reason"

        def retrieve(workers: Workers) -> Change[None]:
            return Change(partial(self._set_back, self._integrity.retrieve(workers)))

        self._collectives.change(retrieve)
        self._collectives.together(self._steps.make_together)
        step = self._collectives.step = self._trained.progress.position.step
        self._judge.discard_unconfirmed()
        self._listeners.tell(lambda one: one.went_back(reached, step, doubt))

    def _set_back(self, snapshot: Snapshot) -> None:
        self._trained.go_back(snapshot)
        self._steps.drop()
        self._steps.forget()

    def _has_flipped(self) -> bool:
        return self._steps.has_lost or (not self._integrity.script_writes and self._steps.has_flipped)
