"""Whether the state is right, and which one to go back to if it is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.checkpoint.codec import flatten
from unisono.checkpoint.quick_digest import combined
from unisono.checkpoint.snapshot import Digests, FrozenSnapshot, Snapshot
from unisono.errors import CheckpointError, JobMismatch, MemoryFault, UnisonoWarning
from unisono.plan.audits import Finding
from unisono.received import value_of
from unisono.train.group.collectives import Change
from unisono.train.group.control import Flags
from unisono.train.group.majority import Verdict, healing, judged, verdict
from unisono.train.group.membership import StateTransfer
from unisono.train.group.workers import Workers
from unisono.train.state.checkpoints import as_tree
from unisono.train.state.trained import Doubt, Trained
from unisono.words import MODULUS, sum_of_words

MOST_RETURNS = 3
"""To one state, for what one worker finds in its own memory."""

KEEPERS = 2
"""So many workers, those of the lowest ranks, keep a copy of the newest verified state."""

Place = tuple[int, int]
"""A step, and a call of ``step.run`` in it."""

FORMS = {
    "kept": tuple[tuple[int, Digests] | None, tuple[int, Digests] | None],
    "cleared": list[int],
    "returns": int,
    "digests": list[tuple[int, int, int]],
    "wrong": list[tuple[int, int, tuple[int, ...]]],
    "ignored": list[str],
    "before": dict[str, list[int]],
    "script_writes": bool,
    "unseen": str,
}
"""Of what a worker that lacks the state is given."""

Note = Callable[[], None]
"""Sets what was decided. Part of a change of the state, so that all workers have decided it, or none."""

Mend = Callable[[Workers, StateTransfer, str], None]
"""Gives the right state to those who lack it. Told what they held a wrong one of. Collective."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A state that all workers had alike.

    Attributes:
        step: steps that were committed.
        digests: on which all agreed.
    """

    step: int
    digests: Digests


@dataclass(slots=True)
class Trail:
    """What weights were computed with since a verified state: a replay has to come by the same.

    Attributes:
        digests: on which all workers agreed, by place.
        wrong: what was found where somebody was wrong: a fault does not come twice in the same way.
    """

    digests: dict[Place, int] = field(default_factory=dict)
    wrong: dict[Place, tuple[int, ...]] = field(default_factory=dict)


class Integrity:
    """Compares what workers hold, keeps the newest state that is known to be right, and finds it again.

    In every step workers compare the weights and buffers that they computed with, before anything is committed. Who
    differs from most is given their state (``mend``), and the step is computed again. Where nobody can say who is
    right, the state is *doubted* (``trained.doubt``): nothing is computed any more until the next boundary, where the
    run goes back to the kept state (:meth:`retrieve`) and computes the steps after it again. They end in the same bits.

    What is known of the states decides which collective calls come next. So whatever is decided in a collective call
    is returned as a :data:`Note`, and is set in the call's change; and it is handed over with the state
    (:meth:`give`). Only the copies are each worker's own.

    Args:
        trained: what is compared and kept.
        every: steps from one comparison of the whole state to the next; None for no comparisons at all.
        audits: whether a state counts as right only when every worker was audited after it.
        shares: whether workers share one copy: where they read it differently, it has changed in between.

    Attributes:
        script_writes: whether it was the script that had changed a bit: then nobody can tell such changes from faults.
    """

    def __init__(
        self,
        trained: Trained,
        every: int | None,
        *,
        audits: bool = False,
        shares: bool = False,
    ) -> None:
        self._trained, self._every = trained, every
        self._kept: Kept | None = None
        self._audits, self._shares = audits, shares
        self._waits: Kept | None = None  # for audits of all workers
        self._copies: dict[int, FrozenSnapshot] = {}  # of these states, by step, on workers that keep some
        self._cleared: set[int] = set()
        self._returns = 0
        self._trail = Trail()
        self._ignored: set[str] = set()  # registered objects that the script has another one of on each worker
        self._before: dict[str, list[int]] = {}  # how they differed when the run went back last
        self._unseen = ""  # why nobody can tell whether the state is right; empty if workers have compared theirs
        self.script_writes = False

    @property
    def is_on(self) -> bool:
        """Whether anything is compared."""
        return self._every is not None

    def due(self, step: int) -> bool:
        """Whether the whole state is to be compared after so many steps."""
        return self._every is not None and step % self._every == 0

    def judge(self, place: Place, flags: Sequence[Flags]) -> tuple[Verdict, Note]:
        """What the workers' control words say of the weights that a call was computed with.

        Raises:
            JobMismatch: a replay came by other weights than the first time.
            MemoryFault: the weights are wrong, and there is no state to go back to; or that again and again.
        """
        if lost := [f"rank {rank}" for rank, each in enumerate(flags) if each.lost]:
            why = f"{', '.join(lost)} made an update from a gradient that memory had not kept"
            return Verdict.WRONG, self._give_way(place, f"step {place[0]}: {why}")
        if not self.is_on:
            return Verdict.RIGHT, nothing
        return self._judge(place, flags, script_writes=self.script_writes)

    def _judge(self, place: Place, flags: Sequence[Flags], *, script_writes: bool) -> tuple[Verdict, Note]:
        found = judged([replace(each, flipped=False) for each in flags] if script_writes else flags)
        if found is Verdict.RIGHT:
            return found, self._follow(place, (flags[0].digest + sum(each.own for each in flags)) % MODULUS)
        if found is Verdict.WRONG:
            return self._wrong(place, flags)
        return found, nothing

    def audited(self, findings: Sequence[Finding], computing: Collection[int], why: str = "") -> Note:
        """What audits of a call came to. Whoever has computed right did so before, too.

        Args:
            findings: of the call.
            computing: all ranks that compute.
            why: for people: a worker computes wrongly, nobody knows since when, so the run goes back to a state that
                audits have confirmed. Empty if none does.

        Raises:
            MemoryFault: there is no such state.
        """
        give_way = self._give_way((0, 0), why) if why else nothing

        def note() -> None:
            for finding in findings:
                self._clear(finding.right, computing)
            if why:
                self._trail = Trail()
            give_way()

        return note

    def _clear(self, ranks: Iterable[int], computing: Collection[int]) -> None:
        self._cleared |= set(ranks)
        if self._waits is not None and self._cleared >= set(computing):
            self._take_as_right(self._waits)

    def regroup(self) -> None:
        """Ranks mean other workers from now on."""
        self._cleared.clear()

    def compare(
        self,
        workers: Workers,
        step: int,
        mend: Mend,
        has_flipped: Callable[[], bool],
        *,
        weights_only: bool = False,
        is_healed: bool = False,
    ) -> Change[Digests]:
        """Compare the whole state at a boundary, and know it as right if it is. Collective.

        Args:
            workers: that hold it.
            step: steps that are committed.
            mend: gives the right state to those who lack it.
            has_flipped: whether a bit of this worker's memory is not as its newest update has left it, where it can
                tell.
            weights_only: where workers keep other things for themselves, and none can go back.
            is_healed: whether those that held another state than most were just given theirs.

        Returns:
            what comes to the digests on which all agree; to none if the state is doubted then.
        """
        if (doubt := self.settle_suspicion(workers, (step, 0))) is not None:
            return _noted(doubt)
        snapshot = self._trained.capture()
        digests = snapshot.digests()
        compared = list(digests.values())[: 1 if weights_only else None]
        told = workers.gather_json([compared, self._registered(snapshot), self._before, has_flipped()])
        if struck := [f"rank {rank}" for rank, (*_, is_so) in enumerate(told) if is_so]:
            return _noted(self._give_way((step, 0), f"after {step} steps {_unlike(struck)}"))
        held = [tuple(own) for own, *_ in told]
        found = verdict(held)
        can_heal = found is Verdict.HEALING and not (self._shares or is_healed)
        if can_heal and (transfer := healing(held)) is not None:
            mend(workers, transfer, "state")
            # Registered objects may have been made of the state that was wrong: an average of the weights, say.
            return self.compare(workers, step, mend, has_flipped, weights_only=weights_only, is_healed=True)
        if found is not Verdict.RIGHT:
            return _noted(self._differ(step, held))
        new, note = self._objects_differ(step, [(objects, before) for _, objects, before, _ in told])
        if new:
            return _noted(note)

        def know() -> None:
            note()
            self._unseen = ""
            if not weights_only:
                self._know(step, digests)

        return _noted(know, digests)

    def _differ(self, step: int, held: Sequence[tuple[int, ...]]) -> Note:
        listed = ", ".join(f"rank {rank}: {'/'.join(f'{one:016x}' for one in own)}" for rank, own in enumerate(held))
        differ = f"after {step} steps the workers hold different states ({listed})"
        place, said = (step, BOUNDARY), tuple(digest for own in held for digest in own)
        if self._trail.wrong.get(place) == said:
            raise JobMismatch(differ + AGAIN)
        return self._go_back_from((step, 0), differ + NO_MAJORITY, place, said)

    def settle_majority(self, workers: Workers, place: Place, mend: Mend) -> Note | None:
        """Most workers hold the same weights: give them, and what belongs to them, to the others. Collective.

        Returns:
            nothing if that was done; if not, what doubts the state, since those did not hold the same optimizer state.
        """
        own = self._trained.capture().digests()
        held = [tuple(each) for each in workers.gather_json(list(own.values()))]
        transfer = healing(held)
        if transfer is None:
            return self._doubting(place, f"step {place[0]}: the workers hold different states{NO_MAJORITY}")
        mend(workers, transfer, "weights")
        return None

    def suspect(self, step: int, digests: Sequence[int]) -> None:
        """This worker alone has the newest state, and hands it to others: what it has decided goes with it.

        Args:
            step: that is under way, or comes next.
            digests: of the state. Where all have agreed on them, there is nothing to suspect.
        """
        agreed = self.agreed(step)
        if self._kept is not None and (agreed is None or list(agreed.values()) != list(digests)):
            self._unseen = (
                f"step {step}: when a worker was lost, another one alone had made the newest update, so nobody could "
                f"compare the weights that it gave to the others"
            )

    def settle_suspicion(self, workers: Workers, place: Place) -> Note | None:
        """Nobody has compared the state that was handed over: doubt it, if there is one to go back to. Collective.

        A loss is no fault: where the run cannot go back, it goes on.

        Returns:
            nothing if nothing is suspected, or nobody has a copy of a verified state of the present loop.
        """
        if not self._unseen:
            return None
        copy, loop = self._whole_copy(), self._trained.progress.loop
        can_return = copy is not None and copy.text["state"]["progress"]["loop"] == loop
        is_back = any(workers.gather_json(can_return))
        return self._doubting(place, self._unseen, is_fault=False) if is_back else None

    def _know(self, step: int, digests: Digests) -> None:
        """All agree: from now on this is the state to go back to."""
        found = Kept(step, digests)
        if self._audits and self._kept is not None:
            if self._waits is None:
                self._waits, self._cleared = found, set()
        else:
            self._take_as_right(found)

    def copy(self, step: int, rank: int) -> None:
        """Keep a copy of the state, on some of the workers, if it is one to go back to. No collective."""
        self._forget_copies()
        if rank >= KEEPERS or step not in self._steps:
            return
        try:
            self._copies[step] = FrozenSnapshot.of(self._trained.capture())
        except CheckpointError as error:
            self._copies.pop(step, None)
            self._warn(f"no state can be kept to go back to: {error}")

    @property
    def _steps(self) -> set[int]:
        return {one.step for one in (self._kept, self._waits) if one is not None}

    def _forget_copies(self) -> None:
        self._copies = {step: copy for step, copy in self._copies.items() if step in self._steps}

    def _take_as_right(self, kept: Kept) -> None:
        self._kept, self._waits, self._returns = kept, None, 0
        since = (kept.step, 0)
        self._trail = Trail({place: seen for place, seen in self._trail.digests.items() if place >= since})
        self._forget_copies()

    def _doubting(self, place: Place, why: str, *, is_fault: bool = True) -> Note:
        """Have the run go back to the kept state at the next boundary.

        Args:
            place: the first call whose result is not to be believed; what went before was right.
            why: for people.
            is_fault: whether anything wrong was seen.
        """

        def note() -> None:
            self._trained.doubt, self._unseen = Doubt(*place, why, is_fault), ""
            self._trail.digests = {at: seen for at, seen in self._trail.digests.items() if at < place}

        return note

    def _give_way(self, place: Place, why: str) -> Note:
        """Doubt the state, unless there is none to go back to, or that has not helped."""
        if self._kept is None or not self.is_on or self._returns >= MOST_RETURNS:
            raise MemoryFault(f"{why}, so the weights are wrong: {START_AGAIN}")
        doubt = self._doubting(place, why)

        def note() -> None:
            self._waits, self._returns = None, self._returns + 1
            doubt()

        return note

    @property
    def confirmed(self) -> int | None:
        """After how many steps audits have found all right last; None without audits."""
        return self._kept.step if self._audits and self._kept is not None else None

    def agreed(self, step: int) -> Digests | None:
        """On what all workers have agreed after so many steps; None if that is not known any more."""
        return next((one.digests for one in (self._waits, self._kept) if one is not None and one.step == step), None)

    def give(self) -> dict[str, Any]:
        """What is known of the states so far, for a worker that lacks it: it decides as the others do. No copies."""
        return {
            "kept": [None if one is None else [one.step, one.digests] for one in (self._kept, self._waits)],
            "cleared": sorted(self._cleared),
            "returns": self._returns,
            "digests": [[*place, seen] for place, seen in self._trail.digests.items()],
            "wrong": [[*place, list(said)] for place, said in self._trail.wrong.items()],
            "ignored": sorted(self._ignored),
            "before": self._before,
            "script_writes": self.script_writes,
            "unseen": self._unseen,
        }

    def take(self, given: Mapping[str, Any]) -> None:
        """Know what another worker has given.

        Raises:
            Unreadable: it is nothing of the kind. Then nothing has changed.
        """
        found = value_of(FORMS, given, "what another worker knows of older states")
        self._kept, self._waits = (None if one is None else Kept(*one) for one in found["kept"])
        self._cleared, self._returns = set(found["cleared"]), found["returns"]
        self._trail = Trail(
            {(step, call): seen for step, call, seen in found["digests"]},
            {(step, call): said for step, call, said in found["wrong"]},
        )
        self._ignored, self._before = set(found["ignored"]), found["before"]
        self.script_writes, self._unseen = found["script_writes"], found["unseen"]

    def retrieve(self, workers: Workers) -> Snapshot:
        """The kept state, on every worker. Collective.

        Raises:
            JobMismatch: there is none, or no copy is what was kept.
            MemoryFault: it is of a loop that is over.
        """
        whole = self._whole_copy()
        told = workers.gather_json(None if whole is None else whole.step)
        newest = max((step for step in told if step is not None), default=None)
        if newest is None:
            why = "" if self._trained.doubt is None else f"{self._trained.doubt.why}, and "
            raise JobMismatch(f"{why}no copy of a verified state is left: {START_AGAIN}")
        source = told.index(newest)
        mine = whole.thawed() if workers.rank == source and whole is not None else None
        found = Snapshot(*workers.broadcast(None if mine is None else as_tree(mine), source))
        if found.state["progress"]["loop"] != self._trained.progress.loop:
            why = "" if self._trained.doubt is None else f"{self._trained.doubt.why}, and "
            raise MemoryFault(
                f"{why}the newest state that is known to be right, that of step {newest}, is of a loop that is over, "
                f"whose steps the script cannot make again. {START_AGAIN}"
            )
        return found

    def _whole_copy(self) -> FrozenSnapshot | None:
        """This worker's copy of the kept state; nothing if it has none, or not as it was kept."""
        kept = self._kept
        copy = None if kept is None else self._copies.get(kept.step)
        return copy if kept is not None and copy is not None and copy.digests() == kept.digests else None

    def _follow(self, place: Place, digest: int) -> Note:
        before = self._trail.digests.get(place, digest)
        if before != digest:
            raise JobMismatch(
                f"step {place[0]} was computed again, after a fault, and came by other weights than the first time "
                f"({digest:016x} instead of {before:016x}): the script changes something that is not restored, such as "
                f"a scheduler that is not registered (run.register). {START_AGAIN}"
            )

        def note() -> None:
            if self._kept is not None:
                self._trail.digests[place] = digest

        return note

    def _wrong(self, place: Place, flags: Sequence[Flags]) -> tuple[Verdict, Note]:
        said = tuple(each.digest for each in flags) + tuple(each.own for each in flags)
        flipped = [f"rank {rank}" for rank, each in enumerate(flags) if each.flipped]
        is_again = self._trail.wrong.get(place) == said
        if is_again and flipped:
            return self._believe(place, flags)
        if is_again:
            raise JobMismatch(f"step {place[0]}: {_differ(flags)}{AGAIN}")
        why = f"step {place[0]}: {_unlike(flipped) if flipped else _differ(flags) + NO_MAJORITY}"
        return Verdict.WRONG, self._go_back_from(place, why, place, said)

    def _believe(self, place: Place, flags: Sequence[Flags]) -> tuple[Verdict, Note]:
        """The same bit has flipped again at the same place: it is the script that writes it."""
        self._warn("the script changes single bits of the state by itself: flipped bits are looked for no more")
        found, note_it = self._judge(place, flags, script_writes=True)

        def note() -> None:
            self.script_writes = True
            note_it()

        return found, note

    def _go_back_from(self, place: Place, why: str, found_at: Place, said: tuple[int, ...]) -> Note:
        """Doubt the state, unless going back has not helped: a script may change weights otherwise each time.

        Args:
            place: the first call whose result is not to be believed.
            why: for people.
            found_at: where it was found.
            said: what was found there. The same there once more is no flipped bit.
        """
        if self._returns >= MOST_RETURNS:
            raise JobMismatch(f"{why}, and going back {MOST_RETURNS} times has not helped: {START_AGAIN}")
        doubt = self._doubting(place, why)

        def note() -> None:
            self._returns += 1
            self._trail.wrong[found_at] = said
            doubt()

        return note

    def _warn(self, words: str) -> None:
        warnings.warn(words, UnisonoWarning, stacklevel=4)

    def _registered(self, snapshot: Snapshot) -> dict[str, int]:
        """Digests of the tensors that registered objects keep. Other values may be one worker's own."""
        found = {}
        for name, state in snapshot.state["registered"].items():
            tensors = flatten(state)[1]
            if tensors and name not in self._ignored:
                found[name] = combined([sum_of_words(tensors[each]) for each in sorted(tensors)])
        return found

    def _objects_differ(
        self, step: int, told: Sequence[tuple[dict[str, int], dict[str, list[int]]]]
    ) -> tuple[bool, Note]:
        """Registered objects may differ since the script wants it so: then they do again in the replay."""
        names = [name for name in told[0][0] if all(name in theirs for theirs, _ in told)]
        held = {name: [theirs[name] for theirs, _ in told] for name in names}
        before = {place: seen for _, theirs in told for place, seen in theirs.items()}
        differ = [name for name in names if len(set(held[name])) > 1]
        again = [name for name in differ if before.get(f"{step} {name}") == held[name]]
        for name in again:
            self._warn(f"the registered object {name!r} differs between workers: checkpoints keep that of rank 0")
        new = [name for name in differ if name not in again]
        why = f"after {step} steps the workers hold different registered objects ({', '.join(new)})"
        doubt = self._doubting((step, 0), why) if new else nothing

        def note() -> None:
            self._ignored |= set(again)
            if new:
                self._before = {f"{step} {name}": held[name] for name in new}
            doubt()

        return bool(new), note


def nothing() -> None:
    """Nothing was decided."""


def _noted(note: Note, digests: Digests | None = None) -> Change[Digests]:
    def make() -> Digests:
        note()
        return digests or {}

    return Change(make)


START_AGAIN = "start the job again, it goes on from its newest verified checkpoint"
NO_MAJORITY = ", and no majority says which are right"
AGAIN = (
    ", and did so again when the steps before were computed again: that is no flipped bit, but a script that changes "
    "weights on some workers only, or a fault of Unisono's"
)
BOUNDARY = -1
"""In place of a call: between two steps."""


def _unlike(struck: Sequence[str]) -> str:
    return f"a bit in the memory of {', '.join(struck)} is not as the update before has left it"


def _differ(flags: Sequence[Flags]) -> str:
    held = ", ".join(f"rank {rank}: {each.digest:016x}" for rank, each in enumerate(flags))
    return f"the workers hold different weights ({held})"
