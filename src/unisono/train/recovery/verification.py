"""Comparing the whole state at boundaries, and what follows from that and from audits."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial

from unisono.checkpoint.snapshot import Digests
from unisono.checkpoint.store import Snapshot
from unisono.errors import JobMismatch, MemoryFault
from unisono.plan.audits import AuditResult
from unisono.train.group.collectives import Change, CollectiveCalls
from unisono.train.group.majority import Verdict, healing, verdict
from unisono.train.group.workers import Workers
from unisono.train.model.update import settings_digest
from unisono.train.recovery.integrity import Integrity, Note, flipped_in, warn
from unisono.train.recovery.known_states import BOUNDARY, START_AGAIN, StateCopies
from unisono.train.recovery.recovery import Snapshots
from unisono.train.state.registered import Differing, differing, digests_of_objects
from unisono.train.step.current import CurrentSteps
from unisono.train.step.run_base import RunBase


class AuditJudge:
    """Says which workers compute wrongly.

    Args:
        run: the base of the run.
        integrity: the record of states, which knows those that audits have confirmed.
    """

    def __init__(self, run: RunBase, integrity: Integrity) -> None:
        self._membership, self._trained, self._checkpoints = run.membership, run.trained, run.checkpoints
        self._listeners, self._integrity = run.listeners, integrity

    def found(self, finding: AuditResult) -> None:
        """Tell what an audit has come to. Collective; what follows from it comes with the call's change."""
        if finding.wrong is None:
            return
        host = self._membership.workers.gather_json(platform.node())[finding.wrong]
        step = self._trained.progress.position.step
        self._listeners.tell(lambda one: one.wrong_result(step, finding, host))

    def judged(
        self, workers: Workers, findings: Sequence[AuditResult], discard: Callable[[], None]
    ) -> tuple[Note, list[int]]:
        """What follows from the audits of a call, and which workers compute wrongly. Collective.

        Args:
            workers: the workers of this generation.
            findings: the results of the call's audits.
            discard: a function that gives up what was computed; called if it may be wrong.

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
        run: the base of the run.
        collectives: the collective calls.
        steps: the present step computer.
        integrity: the record of states, which judges the state.
        copies: this worker's copies of states, to go back to.
        judge: the judge of audits, which knows the checkpoints that may be wrong.
        snapshots: the writer of checkpoints, which settles the state before it is compared.
    """

    def __init__(
        self,
        run: RunBase,
        collectives: CollectiveCalls,
        steps: CurrentSteps,
        integrity: Integrity,
        copies: StateCopies,
        judge: AuditJudge,
        snapshots: Snapshots,
    ) -> None:
        self._membership, self._trained, self._listeners = run.membership, run.trained, run.listeners
        self._collectives, self._steps, self._integrity = collectives, steps, integrity
        self._copies, self._judge, self._snapshots = copies, judge, snapshots

    def verify(self) -> Digests | None:
        """Compare the whole state, and keep it if it is right.

        Returns:
            what all agree on; nothing if the state is doubted, or nothing is compared.
        """
        self._snapshots.settle()
        if not self._integrity.is_on:
            return None
        # What stands before a loop that goes on later is no state to keep: the rest of it is yet to be restored.
        weights_only = self._steps.computer.has_own_weights or self._trained.restored is not None

        digests = self._collectives.change(partial(self._compare, weights_only=weights_only))
        if self._trained.is_doubted:
            return None
        if not weights_only:
            self._copies.keep(self._integrity.known, -1 if self._membership.joins else self._membership.workers.rank)
        return digests

    def require_right(self) -> Digests | None:
        """Compare the whole state outside of steps, where nothing can be computed again.

        Raises:
            JobMismatch: the workers hold different states, and nobody can say who is right.
        """
        verified = self.verify()
        if (doubt := self._trained.doubt) is not None:
            raise JobMismatch(f"{doubt.why}: {START_AGAIN}")
        return verified

    def require_kept(self, rank: int) -> None:
        """Refuse weights that were updated with a wrong gradient, which no comparison can find.

        Raises:
            MemoryFault: an update of this worker was made from a gradient that memory had not kept.
        """
        if self._steps.computer.has_lost and not self._integrity.is_on:
            raise MemoryFault(
                f"rank {rank} made an update from a gradient that memory had not kept, so the weights are "
                f"wrong: start the job again, it goes on from its last checkpoint"
            )

    def go_back(self) -> None:
        """The state is doubted: go on from the newest one that was right."""
        doubt, reached = self._trained.doubt, self._trained.progress.position.step
        assert doubt is not None, "there is a reason"
        if not self._trained.registered:
            self._integrity.require_steady(doubt, settings_digest(self._trained.require_prepared().optimizers))

        def retrieve(workers: Workers) -> Change[None]:
            return Change(partial(self._set_back, self._copies.retrieve(workers, self._integrity.known)))

        self._collectives.change(retrieve)
        self._collectives.together(self._steps.make_together)
        step = self._collectives.step = self._trained.progress.position.step
        self._judge.discard_unconfirmed()
        self._listeners.tell(lambda one: one.went_back(reached, step, doubt))

    def _compare(self, workers: Workers, *, weights_only: bool, is_healed: bool = False) -> Change[Digests | None]:
        """Compare the whole state at a boundary, and know it as right if it is. Collective.

        Args:
            workers: the workers that hold it.
            weights_only: whether to compare the weights only: workers keep other state of their own, and none can go
                back.
            is_healed: whether the workers that differed were just given the state of the others.

        Returns:
            what comes to the digests on which all agree; to none if the state is doubted then.
        """
        known, step = self._integrity.known, self._trained.progress.position.step
        if (doubt := self._integrity.settle_suspicion(workers, (step, 0))) is not None:
            return Change(doubt)
        snapshot = self._trained.capture()
        digests = snapshot.digests()
        compared = workers.devices.joined(list(digests.values())[: 1 if weights_only else None])
        objects = digests_of_objects(snapshot, known.ignored)
        objects, before = workers.devices.first([objects, known.before])
        has_flipped = not workers.devices.all(not self._has_flipped())
        told = workers.gather_json([compared, objects, before, has_flipped])
        if flipped := [rank for rank, (*_, is_so) in enumerate(told) if is_so]:
            return Change(self._integrity.give_way((step, 0), f"after {step} steps {flipped_in(flipped)}"))
        held = [tuple(own) for own, *_ in told]
        found = verdict(held)
        if found is Verdict.HEALING and not is_healed and (transfer := healing(held)) is not None:
            self._collectives.recovery.heal(workers, transfer, "state")
            # Registered objects may have been made of the state that was wrong: an average of the weights, say.
            return self._compare(workers, weights_only=weights_only, is_healed=True)
        if found is not Verdict.RIGHT:
            return Change(self._differ(step, held))
        self._integrity.require_held(step, held[0])
        differ = differing(step, [(theirs, before) for _, theirs, before, _ in told])
        return Change(self._agree(step, digests, differ, weights_only=weights_only))

    def _differ(self, step: int, held: Sequence[Sequence[int]]) -> Note:
        """No majority of workers holds the same state; ``held`` are its digests, by rank."""
        listed = ", ".join(f"rank {rank}: {'/'.join(f'{one:016x}' for one in own)}" for rank, own in enumerate(held))
        why = f"after {step} steps the workers hold different states ({listed})"
        said = [digest for own in held for digest in own]
        return self._integrity.go_back_from((step, 0), why, (step, BOUNDARY), said)

    def _agree(
        self, step: int, digests: Digests, objects: Differing, *, weights_only: bool
    ) -> Callable[[], Digests | None]:
        """All hold the same, but perhaps in registered objects: if the script wants it so, they do in a replay, too."""
        for name in objects.again:
            warn(f"the registered object {name!r} differs between workers: checkpoints keep that of rank 0")
        integrity, names = self._integrity, ", ".join(place.partition(" ")[2] for place in objects.new)
        doubt = integrity.doubting(
            (step, 0), f"after {step} steps the workers hold different registered objects ({names})"
        )

        def make() -> Digests | None:
            integrity.known.ignored += objects.again
            if objects.new:
                integrity.known.before = objects.new
                doubt()
                return None
            integrity.know(step, None if weights_only else digests)
            return digests

        return make

    def _set_back(self, snapshot: Snapshot) -> None:
        self._steps.drop()  # before weights are set, which is no write of the script
        self._steps.forget()
        self._trained.go_back(snapshot)

    def _has_flipped(self) -> bool:
        return self._steps.computer.has_lost or (
            not self._integrity.known.script_writes and self._steps.computer.has_flipped
        )
