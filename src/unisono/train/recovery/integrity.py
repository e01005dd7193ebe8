"""The integrity of the state: comparisons between workers, and the return to an older state if it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from unisono.checkpoint.snapshot import Digests
from unisono.errors import JobMismatch, MemoryFault
from unisono.host.tracebacks import warn
from unisono.plan.audits import AuditResult
from unisono.train.group.membership import StateTransfer, Verdict, healing, verdict
from unisono.train.group.workers import Workers
from unisono.train.recovery.known_states import BOUNDARY, START_AGAIN, AgreedState, KnownStates, Place, StateCopies
from unisono.train.state.trained import Doubt, Trained
from unisono.words import MODULUS

MOST_RETURNS = 3
"""The number of times that a run goes back to the same state before it gives up."""

NO_MAJORITY = ", and no majority says which are right"
AGAIN = (
    ", and did so again when the steps before were computed again: that is no flipped bit, but a script that changes "
    "weights on some workers only, or a fault of Unisono's"
)
Note = Callable[[], None]
"""Applies a decision. It is part of a change of the state, so that either all workers apply the decision or none."""

Mend = Callable[[Workers, StateTransfer, str], None]
"""Gives the right state to the workers that lack it; the text names what they held wrong. Collective."""


class HeldStates(NamedTuple):
    """The workers' reports about the state with which they computed a call, by rank.

    Attributes:
        digests: digests (64 bits) of weights and buffers; 0 if nobody compares them.
        flipped: whether a bit of what only that worker looks at has changed since the update before.
        amiss: the difference between the digest after the update before and the present one, if a bit has flipped.
    """

    digests: Sequence[int]
    flipped: Sequence[bool]
    amiss: Sequence[int]


def judged(held: HeldStates) -> Verdict:
    """Judge whether workers hold the same."""
    if True in held.flipped:
        return Verdict.WRONG
    return Verdict.RIGHT if len(set(held.digests)) <= 1 else verdict(held.digests)


class Integrity:
    """Judges the state by what workers report about theirs, and doubts it where nobody can say who is right.

    In every step workers compare the weights and buffers that they computed with, before anything is committed. A
    worker that differs from most gets their state, and the step is computed again. If nobody can say who is right, the
    state is *doubted* (``trained.doubt``): nothing is computed any more until the next boundary. There the run goes
    back to the newest state that is known to be right, and computes the steps after it again. They end in the same
    bits.

    A decision in a collective call is returned as a :data:`Note`, and applied with the call's change.

    Args:
        every: the number of steps between comparisons of the whole state; None for no comparisons at all.
        audits: whether a state counts as right only when every worker was audited after it.
    """

    def __init__(self, trained: Trained, copies: StateCopies, every: int | None, *, audits: bool = False) -> None:
        self._trained, self._copies, self._every, self._audits = trained, copies, every, audits
        self.known = KnownStates()

    @property
    def is_on(self) -> bool:
        """Whether anything is compared."""
        return self._every is not None

    @property
    def confirmed(self) -> int | None:
        """The number of steps after which audits have found all workers right last; None without audits."""
        return self.known.right.step if self._audits and self.known.right is not None else None

    def due(self, step: int) -> bool:
        """Whether to compare the whole state after this many steps."""
        return self._every is not None and step % self._every == 0

    def know(self, step: int, digests: Digests | None) -> None:
        """Note that all workers agree on a state: the run can go back to it, at once or when audits have confirmed it.

        ``digests`` is None if the run cannot go back to this state.
        """
        self.known.unseen = ""
        if digests is not None:
            self.known.add(AgreedState(step, digests), is_audited=self._audits)

    # -- what workers report about a call ----------------------------------------------------------------------------

    def judge(
        self, place: Place, held: HeldStates, inputs: Sequence[int] = (), lost: Sequence[bool] = ()
    ) -> tuple[Verdict, Note]:
        """Judge the weights that a call was computed with, by the workers' control words.

        ``inputs`` are digests of the optimizers' settings, of the limits on the gradient, and of the loss. ``lost``
        says by rank who made an update from a gradient that memory had not kept.

        Raises:
            JobMismatch: a replay has other weights than the first time, or other settings, limits or losses.
            MemoryFault: the weights are wrong, and there is no state to go back to, or going back has not helped.
        """
        if any(before != now for before, now in zip(self.known.given.get(place, ()), inputs, strict=False)):
            raise _differs(place, "with other settings of the optimizers, another limit or another loss")
        verdict, note = self._judge_reports(place, held, lost)

        def note_both() -> None:
            note()
            if self.known.right is not None:  # the loss is left out if weights were wrong: it may be wrong, too
                self.known.given[place] = [*inputs][: None if verdict is Verdict.RIGHT else -1]

        return verdict, note_both

    def _judge_reports(self, place: Place, held: HeldStates, lost: Sequence[bool]) -> tuple[Verdict, Note]:
        if True in lost:
            ranks = [f"rank {rank}" for rank, has_lost in enumerate(lost) if has_lost]
            why = f"{', '.join(ranks)} made an update from a gradient that memory had not kept"
            return Verdict.WRONG, self.give_way(place, f"step {place[0]}: {why}")
        if not self.is_on:
            return Verdict.RIGHT, nothing
        return self._judge(place, _unflipped(held) if self.known.script_writes else held)

    def audited(self, findings: Sequence[AuditResult], computing: Collection[int], why: str = "") -> Note:
        """Return what follows from the audits of a call.

        ``why`` is the reason to go back to a state that audits have confirmed, in words: a worker computes wrongly, and
        nobody knows since when. It is empty if no worker does.

        Raises:
            MemoryFault: there is no such state.
        """
        give_way = self.give_way((0, 0), why) if why else nothing  # from the first step on: nobody knows since when

        def note() -> None:
            for finding in findings:
                self.known.clear(finding.right, computing)
            if why:
                self.known.wrong = {}
            give_way()

        return note

    def _judge(self, place: Place, held: HeldStates) -> tuple[Verdict, Note]:
        result = judged(held)
        if result is Verdict.WRONG:
            return self._wrong(place, held)
        if result is Verdict.RIGHT:
            return result, self._follow(place, held.digests[0])
        return result, nothing

    def _follow(self, place: Place, digest: int) -> Note:
        known = self.known.digests.get(place)
        wrong = self.known.wrong.get(place)
        expected = {known} if known is not None else _right_digests(wrong) if wrong else set()
        if expected and digest not in expected:
            digests = " or ".join(f"{right:016x}" for right in sorted(expected))
            raise _differs(place, f"with other weights ({digest:016x} instead of {digests})")

        def note() -> None:
            if self.known.right is not None:
                self.known.digests[place] = digest

        return note

    def _wrong(self, place: Place, held: HeldStates) -> tuple[Verdict, Note]:
        reports = [number for report in zip(held.digests, held.amiss, strict=True) for number in report]
        flipped = [rank for rank, has_flipped in enumerate(held.flipped) if has_flipped]
        if flipped and self.known.wrong.get(place) == reports:
            return self._believe(place, held)
        digests = ", ".join(f"rank {rank}: {digest:016x}" for rank, digest in enumerate(held.digests))
        why = flipped_in(flipped) if flipped else f"the workers hold different weights ({digests})"
        return Verdict.WRONG, self.go_back_from(place, f"step {place[0]}: {why}", place, reports, is_flip=bool(flipped))

    def _believe(self, place: Place, held: HeldStates) -> tuple[Verdict, Note]:
        """Believe that the script changes bits by itself: the same bit has flipped again at the same place."""
        warn("the script changes single bits of the state by itself: flipped bits are looked for no more")
        result, note_it = self._judge(place, _unflipped(held))

        def note() -> None:
            self.known.script_writes = True
            note_it()

        return result, note

    # -- a state that was handed over --------------------------------------------------------------------------------

    def settle_majority(self, workers: Workers, place: Place, mend: Mend) -> Note | None:
        """Give the weights that most workers hold, and the state that belongs to them, to the others. Collective.

        Return None if that was done; else what doubts the state, since the majority did not hold the same optimizer
        state.
        """
        own_digests = workers.devices.joined(list(self._trained.capture().digests().values()))
        transfer = healing([tuple(digests) for digests in workers.gather_json(own_digests)])
        if transfer is None:
            return self.doubting(place, f"step {place[0]}: the workers hold different states{NO_MAJORITY}")
        mend(workers, transfer, "weights")
        return None

    def has_agreed(self, step: int, digests: Sequence[int]) -> bool:
        """Whether all workers have compared the state with these digests, and held the same."""
        agreed = self.known.agreed(step)
        return agreed is not None and list(agreed.values()) == list(digests)

    def require_held(self, step: int, digests: Sequence[int]) -> None:
        """Refuse a state on which all workers agree, if none of them held it when they differed after as many steps.

        Raises:
            JobMismatch: a replay has led to that state.
        """
        reported, count = self.known.wrong.get((step, BOUNDARY), []), len(digests)
        if reported and [*digests] not in [reported[start : start + count] for start in range(0, len(reported), count)]:
            raise _differs((step - 1, 0), "with another state")

    def require_steady(self, doubt: Doubt, settings: int) -> None:
        """Refuse to go back to the start of the doubted call, if the script has changed optimizers' settings after it.

        The script would change them again when the step is computed again, and no later step could tell.

        Raises:
            JobMismatch: it has.
        """
        inputs = self.known.given.get((doubt.step, doubt.call), [settings])
        if self.known.right is not None and self.known.right.step == doubt.step and inputs[:1] != [settings]:
            raise JobMismatch(
                f"{doubt.why}: the run would go back to this step, behind which the script has changed settings of its "
                f"optimizers, and registers nothing to go back with them, such as a scheduler (run.register). "
                f"{START_AGAIN}"
            )

    def suspect(self, step: int, *, is_agreed: bool) -> None:
        """Note that only this worker has the newest state, and hands it to others together with what it has decided.

        With ``is_agreed``, all workers have agreed on the state before, so nothing is suspicious. ``step`` is the
        number of the present step, or of the next one.
        """
        if self.known.right is not None and not is_agreed:
            self.known.unseen = (
                f"step {step}: when a worker was lost, another one alone had made the newest update, so nobody could "
                f"compare the weights that it gave to the others"
            )

    def settle_suspicion(self, workers: Workers, place: Place) -> Note | None:
        """Doubt a state that was handed over before anybody compared it, if there is a state to go back to. Collective.

        The loss of a worker is no fault: a run that cannot go back goes on. Return None if nothing is suspected, or no
        worker has a copy of a verified state of the present loop.
        """
        if not self.known.unseen:
            return None
        if not any(workers.gather_json(workers.devices.all(self._copies.can_return(self.known)))):
            return None
        return self.doubting(place, self.known.unseen, is_fault=False)

    # -- going back --------------------------------------------------------------------------------------------------

    def doubting(self, place: Place, why: str, *, is_fault: bool = True, is_proven: bool = False) -> Note:
        """Have the run go back to the right state at the next boundary.

        ``place`` is the first call whose result may be wrong. ``is_fault`` says that a fault was seen, ``is_proven``
        that it is known to be one of a host.
        """

        def note() -> None:
            self._trained.doubt, self.known.unseen = Doubt(*place, why, is_fault, is_proven), ""
            self.known.forget_from(place)

        return note

    def give_way(self, place: Place, why: str) -> Note:
        """Doubt the state because of a fault of a host.

        Raises:
            MemoryFault: there is no state to go back to, or going back has not helped.
        """
        if self.known.right is None or not self.is_on or self.known.returns >= MOST_RETURNS:
            raise MemoryFault(f"{why}, so the weights are wrong: {START_AGAIN}")
        doubt = self.doubting(place, why, is_proven=True)

        def note() -> None:
            self.known.waits, self.known.returns = None, self.known.returns + 1
            doubt()

        return note

    def go_back_from(self, place: Place, why: str, at: Place, findings: list[int], *, is_flip: bool = False) -> Note:
        """Doubt the state, unless going back has not helped: a script may change weights differently each time.

        ``place`` is the first call whose result may be wrong, ``at`` where it was found. If ``findings`` come again, no
        bit has flipped. ``is_flip`` says that a worker has found it in its own memory.

        Raises:
            JobMismatch: the same was found again, or going back has not helped.
        """
        if self.known.wrong.get(at) == findings:
            raise JobMismatch(why + AGAIN)
        if not is_flip:
            why += NO_MAJORITY
        if self.known.returns >= MOST_RETURNS:
            raise JobMismatch(f"{why}, and going back {MOST_RETURNS} times has not helped: {START_AGAIN}")
        doubt = self.doubting(place, why, is_proven=is_flip)

        def note() -> None:
            self.known.returns += 1
            self.known.wrong[at] = findings
            doubt()

        return note


def nothing() -> None:
    """Apply no decision: the note of a call in which nothing was decided."""


def _unflipped(held: HeldStates) -> HeldStates:
    return held._replace(flipped=[False] * len(held.flipped))


def _right_digests(findings: Sequence[int]) -> set[int]:
    """The digests of which one was right, given the reports of workers of which some were wrong."""
    amiss = sum(findings[1::2])
    return {(digest + more) % MODULUS for digest in findings[::2] for more in (0, amiss)}


def _differs(place: Place, point: str) -> JobMismatch:
    return JobMismatch(
        f"step {place[0]} was computed again, after a fault, {point} than the first time: the script changes something "
        f"that is not restored, such as a rate or a scheduler that is not registered (run.register). {START_AGAIN}"
    )


def flipped_in(ranks: Sequence[int]) -> str:
    """Say that the memory of some workers has changed since the update before."""
    names = [f"rank {rank}" for rank in ranks]
    return f"a bit in the memory of {', '.join(names)} is not as the update before has left it"
