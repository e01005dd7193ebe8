"""What follows from audits."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

from unisono.errors import MemoryFault
from unisono.plan.audits import Finding
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.recovery.integrity import Integrity, Note
from unisono.train.state.checkpoints import Checkpoints
from unisono.train.state.trained import Trained
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
