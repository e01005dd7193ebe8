"""The integrity of the state: comparisons between workers, and the return to an older state if it is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from unisono.checkpoint.snapshot import Digests
from unisono.errors import JobMismatch, MemoryFault, UnisonoWarning
from unisono.plan.audits import AuditResult
from unisono.train.group.control import Flags
from unisono.train.group.majority import Verdict, healing, judged
from unisono.train.group.membership import StateTransfer
from unisono.train.group.workers import Workers
from unisono.train.recovery.known_states import BOUNDARY, START_AGAIN, AgreedState, KnownStates, Place, StateCopies
from unisono.train.state.trained import Doubt, Trained
from unisono.words import MODULUS

MOST_RETURNS = 3
"""To one state, for what one worker finds in its own memory."""

NO_MAJORITY = ", and no majority says which are right"
AGAIN = (
    ", and did so again when the steps before were computed again: that is no flipped bit, but a script that changes "
    "weights on some workers only, or a fault of Unisono's"
)
Note = Callable[[], None]
"""Sets what was decided. Part of a change of the state, so that all workers have decided it, or none."""

Mend = Callable[[Workers, StateTransfer, str], None]
"""Gives the right state to those who lack it. Told what they held a wrong one of. Collective."""


class Integrity:
    """Judges the state by what workers say of theirs, and doubts it where nobody can say who is right.

    In every step workers compare the weights and buffers that they computed with, before anything is committed. Who
    differs from most is given their state, and the step is computed again. If nobody can say who is right, the state
    is *doubted* (``trained.doubt``): nothing is computed any more until the next boundary, where the run goes back to
    the newest state that is known to be right, and computes the steps after it again. They end in the same bits.

    Whatever is decided in a collective call is returned as a :data:`Note`, and is set in the call's change.

    Args:
        trained: the state of the run.
        copies: this worker's copies of states, to go back to.
        every: the number of steps between comparisons of the whole state; None for no comparisons at all.
        audits: whether a state counts as right only when every worker was audited after it.

    Attributes:
        known: the record of the states so far.
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
        """After how many steps audits have found all right last; None without audits."""
        return self.known.right.step if self._audits and self.known.right is not None else None

    def due(self, step: int) -> bool:
        """Whether the whole state is to be compared after so many steps."""
        return self._every is not None and step % self._every == 0

    def know(self, step: int, digests: Digests | None) -> None:
        """All agree: from now on this is the state to go back to, or it is when audits have confirmed it.

        Args:
            step: after which they have compared theirs.
            digests: on which they agree; None if that is no state to go back to.
        """
        self.known.unseen = ""
        if digests is not None:
            self.known.add(AgreedState(step, digests), is_audited=self._audits)

    def take(self, tree: Any) -> None:
        """Know what another worker knows, which decides as the others do then.

        Raises:
            Unreadable: it is nothing of the kind. Then nothing has changed.
        """
        self.known = KnownStates.of(tree)

    # -- what is said of a call --------------------------------------------------------------------------------------

    def judge(self, place: Place, flags: Sequence[Flags], given: Sequence[int] = ()) -> tuple[Verdict, Note]:
        """What the workers' control words say of the weights that a call was computed with.

        Args:
            place: the call.
            flags: the control words.
            given: digests of the optimizers' settings, of the limits on the gradient, and of the loss.

        Raises:
            JobMismatch: a replay came by other weights than the first time, or by something else that is given.
            MemoryFault: the weights are wrong, and there is no state to go back to; or that again and again.
        """
        if any(before != now for before, now in zip(self.known.given.get(place, ()), given, strict=False)):
            raise _differs(place, "with other settings of the optimizers, another limit or another loss")
        verdict, note = self._said(place, flags)

        def note_both() -> None:
            note()
            if self.known.right is not None:  # what is wrong may show in the loss
                self.known.given[place] = [*given][: None if verdict is Verdict.RIGHT else -1]

        return verdict, note_both

    def _said(self, place: Place, flags: Sequence[Flags]) -> tuple[Verdict, Note]:
        if lost := [f"rank {rank}" for rank, each in enumerate(flags) if each.lost]:
            why = f"{', '.join(lost)} made an update from a gradient that memory had not kept"
            return Verdict.WRONG, self.give_way(place, f"step {place[0]}: {why}")
        if not self.is_on:
            return Verdict.RIGHT, nothing
        return self._judge(place, _unflipped(flags) if self.known.script_writes else flags)

    def audited(self, findings: Sequence[AuditResult], computing: Collection[int], why: str = "") -> Note:
        """What audits of a call came to.

        Args:
            findings: the results of the call's audits.
            computing: all ranks that compute.
            why: the reason, for people, to go back to a state that audits have confirmed: a worker computes wrongly,
                nobody knows since when. Empty if none does.

        Raises:
            MemoryFault: there is no such state.
        """
        give_way = self.give_way((0, 0), why) if why else nothing

        def note() -> None:
            for finding in findings:
                self.known.clear(finding.right, computing)
            if why:
                self.known.wrong = {}
            give_way()

        return note

    def _judge(self, place: Place, flags: Sequence[Flags]) -> tuple[Verdict, Note]:
        found = judged(flags)
        if found is Verdict.WRONG:
            return self._wrong(place, flags)
        if found is Verdict.RIGHT:
            return found, self._follow(place, flags[0].digest)
        return found, nothing

    def _follow(self, place: Place, digest: int) -> Note:
        known = self.known.digests.get(place)
        before = _right_ones(self.known.wrong.get(place, ())) if known is None else {known}
        if before and digest not in before:
            listed = " or ".join(f"{one:016x}" for one in sorted(before))
            raise _differs(place, f"with other weights ({digest:016x} instead of {listed})")

        def note() -> None:
            if self.known.right is not None:
                self.known.digests[place] = digest

        return note

    def _wrong(self, place: Place, flags: Sequence[Flags]) -> tuple[Verdict, Note]:
        said = [number for each in flags for number in (each.digest, each.amiss)]
        flipped = [rank for rank, each in enumerate(flags) if each.flipped]
        if flipped and self.known.wrong.get(place) == said:
            return self._believe(place, flags)
        held = ", ".join(f"rank {rank}: {each.digest:016x}" for rank, each in enumerate(flags))
        why = flipped_in(flipped) if flipped else f"the workers hold different weights ({held})"
        return Verdict.WRONG, self.go_back_from(place, f"step {place[0]}: {why}", place, said, is_flip=bool(flipped))

    def _believe(self, place: Place, flags: Sequence[Flags]) -> tuple[Verdict, Note]:
        """The same bit has flipped again at the same place: it is the script that writes it."""
        warn("the script changes single bits of the state by itself: flipped bits are looked for no more")
        found, note_it = self._judge(place, _unflipped(flags))

        def note() -> None:
            self.known.script_writes = True
            note_it()

        return found, note

    # -- a state that was handed over --------------------------------------------------------------------------------

    def settle_majority(self, workers: Workers, place: Place, mend: Mend) -> Note | None:
        """Most workers hold the same weights: give them, and what belongs to them, to the others. Collective.

        Returns:
            nothing if that was done; if not, what doubts the state, since those did not hold the same optimizer state.
        """
        own = workers.devices.joined(list(self._trained.capture().digests().values()))
        transfer = healing([tuple(each) for each in workers.gather_json(own)])
        if transfer is None:
            return self.doubting(place, f"step {place[0]}: the workers hold different states{NO_MAJORITY}")
        mend(workers, transfer, "weights")
        return None

    def has_agreed(self, step: int, digests: Sequence[int]) -> bool:
        """Whether all have compared the state of these digests, and hold the same."""
        agreed = self.known.agreed(step)
        return agreed is not None and list(agreed.values()) == list(digests)

    def require_held(self, step: int, digests: Sequence[int]) -> None:
        """Refuse a state on which all agree, and which none of them held where they differed after so many steps.

        Raises:
            JobMismatch: a replay came by that state.
        """
        said, count = self.known.wrong.get((step, BOUNDARY), []), len(digests)
        if said and [*digests] not in [said[at : at + count] for at in range(0, len(said), count)]:
            raise _differs((step - 1, 0), "with another state")

    def require_steady(self, doubt: Doubt, settings: int) -> None:
        """Refuse to go back to where the doubted call began, if the script has set the optimizers otherwise behind it.

        It does so again when the step is computed again. Whether from there on, no later step can tell.

        Raises:
            JobMismatch: it has.
        """
        given = self.known.given.get((doubt.step, doubt.call), [settings])
        if self.known.right is not None and self.known.right.step == doubt.step and given[:1] != [settings]:
            raise JobMismatch(
                f"{doubt.why}: the run would go back to this step, behind which the script has changed settings of its "
                f"optimizers, and registers nothing to go back with them, such as a scheduler (run.register). "
                f"{START_AGAIN}"
            )

    def suspect(self, step: int, *, is_agreed: bool) -> None:
        """This worker alone has the newest state, and hands it to others: what it has decided goes with it.

        Args:
            step: the number of the present step, or of the next one.
            is_agreed: whether all have agreed on it before. Then there is nothing to suspect.
        """
        if self.known.right is not None and not is_agreed:
            self.known.unseen = (
                f"step {step}: when a worker was lost, another one alone had made the newest update, so nobody could "
                f"compare the weights that it gave to the others"
            )

    def settle_suspicion(self, workers: Workers, place: Place) -> Note | None:
        """Nobody has compared the state that was handed over: doubt it, if there is one to go back to. Collective.

        A loss is no fault: where the run cannot go back, it goes on.

        Returns:
            nothing if nothing is suspected, or nobody has a copy of a verified state of the present loop.
        """
        if not self.known.unseen:
            return None
        if not any(workers.gather_json(workers.devices.all(self._copies.can_return(self.known)))):
            return None
        return self.doubting(place, self.known.unseen, is_fault=False)

    # -- going back --------------------------------------------------------------------------------------------------

    def doubting(self, place: Place, why: str, *, is_fault: bool = True, is_proven: bool = False) -> Note:
        """Have the run go back to the right state at the next boundary.

        Args:
            place: the first call whose result is not to be believed; what went before was right.
            why: the reason, for people.
            is_fault: whether anything wrong was seen.
            is_proven: whether it is known to be a fault of a host.
        """

        def note() -> None:
            self._trained.doubt, self.known.unseen = Doubt(*place, why, is_fault, is_proven), ""
            self.known.forget_from(place)

        return note

    def give_way(self, place: Place, why: str) -> Note:
        """A fault of a host: doubt the state, unless there is none to go back to, or that has not helped."""
        if self.known.right is None or not self.is_on or self.known.returns >= MOST_RETURNS:
            raise MemoryFault(f"{why}, so the weights are wrong: {START_AGAIN}")
        doubt = self.doubting(place, why, is_proven=True)

        def note() -> None:
            self.known.waits, self.known.returns = None, self.known.returns + 1
            doubt()

        return note

    def go_back_from(self, place: Place, why: str, found_at: Place, said: list[int], *, is_flip: bool = False) -> Note:
        """Doubt the state, unless going back has not helped: a script may change weights otherwise each time.

        Args:
            place: the first call whose result is not to be believed.
            why: the reason, for people.
            found_at: the place where it was found.
            said: the findings there. The same there once more is no flipped bit.
            is_flip: whether a worker has found it in its own memory.
        """
        if self.known.wrong.get(found_at) == said:
            raise JobMismatch(why + AGAIN)
        if not is_flip:
            why += NO_MAJORITY
        if self.known.returns >= MOST_RETURNS:
            raise JobMismatch(f"{why}, and going back {MOST_RETURNS} times has not helped: {START_AGAIN}")
        doubt = self.doubting(place, why, is_proven=is_flip)

        def note() -> None:
            self.known.returns += 1
            self.known.wrong[found_at] = said
            doubt()

        return note


def nothing() -> None:
    """Nothing was decided."""


def warn(words: str) -> None:
    """Tell whoever runs the script."""
    warnings.warn(words, UnisonoWarning, stacklevel=4)


def _unflipped(flags: Sequence[Flags]) -> list[Flags]:
    return [replace(each, flipped=False) for each in flags]


def _right_ones(said: Sequence[int]) -> set[int]:
    """The digests of which one was right, where workers have said of theirs that some were wrong."""
    amiss = sum(said[1::2])
    return {(digest + more) % MODULUS for digest in said[::2] for more in (0, amiss)}


def _differs(place: Place, what: str) -> JobMismatch:
    return JobMismatch(
        f"step {place[0]} was computed again, after a fault, {what} than the first time: the script changes something "
        f"that is not restored, such as a rate or a scheduler that is not registered (run.register). {START_AGAIN}"
    )


def flipped_in(ranks: Sequence[int]) -> str:
    """Some workers say of their own memory that it is not as they have left it."""
    struck = [f"rank {rank}" for rank in ranks]
    return f"a bit in the memory of {', '.join(struck)} is not as the update before has left it"
