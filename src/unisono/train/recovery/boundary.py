"""The boundary between two steps of a loop, where all workers have the same state: it is compared and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from unisono.checkpoint.snapshot import Digests, Snapshot
from unisono.errors import JobMismatch, MemoryFault
from unisono.host.tracebacks import warn
from unisono.train.group.collectives import Change, CollectiveCalls
from unisono.train.group.membership import Verdict, healing, verdict
from unisono.train.group.workers import Workers
from unisono.train.model.update import settings_digest
from unisono.train.recovery.compared_steps import JudgedAudits
from unisono.train.recovery.integrity import Integrity, Note, flipped_in
from unisono.train.recovery.known_states import BOUNDARY, START_AGAIN, StateCopies
from unisono.train.recovery.recovery import Recovery, Snapshots
from unisono.train.state.registry import Differing, differing
from unisono.train.state.trained import RunProgress
from unisono.train.step.current import CurrentSteps
from unisono.train.step.run_base import RunBase

MOST_RETURNS = 5
"""Times that a run goes back from the same step."""


class Verification:
    """Verifies the state of a run between its steps."""

    def __init__(
        self,
        run: RunBase,
        collectives: CollectiveCalls,
        steps: CurrentSteps,
        integrity: Integrity,
        copies: StateCopies,
        audits: JudgedAudits,
        snapshots: Snapshots,
    ) -> None:
        self._membership, self._trained, self._listeners = run.membership, run.trained, run.listeners
        self._collectives, self._steps, self._integrity = collectives, steps, integrity
        self._copies, self._audits, self._snapshots = copies, audits, snapshots
        self._returns: Counter[int] = Counter()  # by the step that was reached

    def verify(self) -> Digests | None:
        """Compare the whole state, and keep a copy of it if it is right.

        Return the digests on which all agree; None if the state is doubted, or nothing is compared.
        """
        self._snapshots.settle()
        if not self._integrity.is_on:
            return None
        # Before the loop in which a checkpoint was written, part of its state has yet to be restored: keep none.
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
        """Refuse weights that were updated with a wrong gradient: no comparison can find that.

        Raises:
            MemoryFault: an update of this worker was made from a gradient that memory had not kept.
        """
        if self._steps.computer.has_lost and not self._integrity.is_on:
            raise MemoryFault(
                f"rank {rank} made an update from a gradient that memory had not kept, so the weights are "
                f"wrong: start the job again, it goes on from its last checkpoint"
            )

    def go_back(self) -> None:
        """Go back from a doubted state to the newest one that was right."""
        doubt, reached = self._trained.doubt, self._trained.progress.position.step
        assert doubt is not None, "there is a reason"
        self._returns[reached] += 1
        if self._returns[reached] > MOST_RETURNS:
            raise JobMismatch(
                f"{doubt.why}; the run has gone back from there {MOST_RETURNS} times, and it was no better any time. "
                f"What differs may be what the script does on each worker: {START_AGAIN}"
            )
        if not self._trained.registry.objects:
            self._integrity.require_steady(doubt, settings_digest(self._trained.require_prepared().optimizers))

        def retrieve(workers: Workers) -> Change[None]:
            return Change(partial(self._set_back, self._copies.retrieve(workers, self._integrity.known)))

        self._collectives.change(retrieve)
        self._collectives.together(self._steps.make_together)
        step = self._collectives.step = self._trained.progress.position.step
        self._audits.discard_unconfirmed()
        self._listeners.went_back(reached, step, doubt)

    def _compare(self, workers: Workers, *, weights_only: bool, is_healed: bool = False) -> Change[Digests | None]:
        """Compare the whole state at a boundary, and know it as right if it is. Collective.

        With ``weights_only``, workers keep other state of their own, and none can go back. If ``is_healed``, the
        workers that differed have just been given the state of the others.

        Returns:
            a change that returns the digests on which all agree; None if the state is doubted then.
        """
        known, step = self._integrity.known, self._trained.progress.position.step
        if (doubt := self._integrity.settle_suspicion(workers, (step, 0))) is not None:
            return Change(doubt)
        snapshot = self._trained.capture()
        digests = snapshot.digests()
        compared = workers.devices.joined(list(digests.values())[: 1 if weights_only else None])
        objects = self._trained.registry.digests(snapshot, known.ignored)
        objects, before = workers.devices.first([objects, known.before])
        has_flipped = not workers.devices.all(not self._has_flipped())
        reports = workers.gather_json([compared, objects, before, has_flipped])
        if flipped := [rank for rank, (*_, is_flipped) in enumerate(reports) if is_flipped]:
            return Change(self._integrity.give_way((step, 0), f"after {step} steps {flipped_in(flipped)}"))
        held = [tuple(own) for own, *_ in reports]
        result = verdict(held)
        if result is Verdict.HEALING and not is_healed and (transfer := healing(held)) is not None:
            self._collectives.recovery.heal(workers, transfer, "state")
            # Registered objects may have been made from the wrong state, such as an average of the weights.
            return self._compare(workers, weights_only=weights_only, is_healed=True)
        if result is not Verdict.RIGHT:
            return Change(self._differ(step, held))
        self._integrity.require_held(step, held[0])
        differ = differing(step, [(own_objects, before) for _, own_objects, before, _ in reports])
        places = self._differing_places(workers, snapshot, differ.names) if differ.names else ""
        return Change(self._agree(step, digests, differ, places, weights_only=weights_only))

    def _differing_places(self, workers: Workers, snapshot: Snapshot, names: Collection[str]) -> str:
        """Return where objects differ between workers, for people. Collective."""
        own = workers.devices.first(self._trained.registry.places(snapshot, names))
        held = workers.gather_json(own)
        places = [place for place in held[0] if any(other.get(place) != held[0][place] for other in held)]
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        return f"{places[0]}{more}" if places else "their tensors are not the same ones"

    def _differ(self, step: int, held: Sequence[Sequence[int]]) -> Note:
        """Doubt the state: no majority of workers holds the same. ``held`` are its digests, by rank."""
        states = ", ".join(
            f"rank {rank}: {'/'.join(f'{digest:016x}' for digest in own)}" for rank, own in enumerate(held)
        )
        why = f"after {step} steps the workers hold different states ({states})"
        digests = [digest for own in held for digest in own]
        return self._integrity.go_back_from((step, 0), why, (step, BOUNDARY), digests)

    def _agree(
        self, step: int, digests: Digests, objects: Differing, places: str, *, weights_only: bool
    ) -> Callable[[], Digests | None]:
        """Know a state that all workers hold, but for registered objects that may differ.

        If the script makes these different on purpose, they differ in the same way in a replay.
        """
        for name in objects.again:
            warn(f"the registered object {name!r} differs between workers ({places}): checkpoints keep that of rank 0")
        integrity, names = self._integrity, ", ".join(place.partition(" ")[2] for place in objects.new)
        doubt = integrity.doubting(
            (step, 0), f"after {step} steps the workers hold different registered objects ({names}): {places}"
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
        self._steps.drop()  # first, or setting the weights would look like a write of the script
        self._steps.forget()
        self._trained.go_back(snapshot)

    def _has_flipped(self) -> bool:
        return self._steps.computer.has_lost or (
            not self._integrity.known.script_writes and self._steps.computer.has_flipped
        )


class Boundary:
    """Verifies and writes the state when that is due, goes back if it is wrong, and lets workers join and leave."""

    def __init__(
        self,
        run: RunBase,
        collectives: CollectiveCalls,
        steps: CurrentSteps,
        integrity: Integrity,
        verification: Verification,
        recovery: Recovery,
        snapshots: Snapshots,
    ) -> None:
        self.trained, self.checkpoints, self.requests = run.trained, run.checkpoints, run.requests
        self.collectives, self.steps, self.integrity, self.verification = collectives, steps, integrity, verification
        self.recovery, self.snapshots = recovery, snapshots

    def reached(self, *, is_end: bool) -> RunProgress:
        """Do what is due at a boundary. All workers are here, and have the same state unless a round is open.

        ``is_end`` says that the loop ends here. Return the progress from which the run goes on: the present one, unless
        the run has gone back.
        """
        if not self.trained.is_doubted and not self.steps.computer.is_open:
            self._keep_state(is_end=is_end)
        self.requests.compare &= self.steps.computer.is_open
        if is_back := self.trained.is_doubted:
            self.verification.go_back()
        if self.requests.regroup and (is_back or not is_end) and not self.steps.computer.is_open:
            self.collectives.regroup(None, at_boundary=True)
        return self.trained.progress

    def cut_short(self) -> None:
        """End a loop before its end. Called after :meth:`reached`."""
        if not self.steps.computer.is_open:
            self.snapshots.save_cut(self.integrity.known.agreed(self.trained.progress.position.step))

    def _keep_state(self, *, is_end: bool) -> None:
        step = self.trained.progress.position.step
        self.checkpoints.requested |= self.requests.checkpoint
        is_due = self.requests.compare or self.integrity.due(step) or self.checkpoints.due(step)
        verified = self.verification.verify() if is_due or is_end else None
        if is_end:
            return
        if self.requests.leave and not self.trained.is_doubted:
            self.recovery.depart_together(verified)
        self.snapshots.save_if_due(verified)
        self.requests.checkpoint = False
