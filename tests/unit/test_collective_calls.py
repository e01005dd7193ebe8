"""A collective call is completed, done again, or taken from those who have its result: never done twice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import pytest

from unisono.errors import JobEnded, JobMismatch, WorkerLost
from unisono.membership.messages import NewGeneration, Ranks
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.train.group.collectives import MOST_FRUITLESS, Change, CollectiveCalls
from unisono.train.group.elastic import transfer_in
from unisono.train.group.membership import MemberProgress, Membership, Recovers, StateTransfer
from unisono.train.group.workers import Workers

pytestmark = pytest.mark.unit


@dataclass
class FakeWorkers:
    """This worker's view of a generation: what a source tells is made up beforehand."""

    rank: int = 0
    world_size: int = 1
    generation: Generation = field(default_factory=lambda: Generation(1, 0, Split((0, 1))))
    told: Any = None
    ticks: int = 0
    is_called: bool = False

    def broadcast(self, value: Any, source: int) -> Any:
        return value if self.rank == source else self.told

    def require_same(self, what: str, fields: Mapping[str, Any], cure: str) -> None:
        pass


@dataclass
class FakeRecovery(Recovers):
    """Notes what it is given, and gives it; loses workers as it makes what computes."""

    weights: Any = 0
    given: int = 0
    alone: int = 0
    taken: list[tuple[Any, bool]] = field(default_factory=list)
    losses: list[WorkerLost] = field(default_factory=list)

    def give(self) -> Any:
        self.given += 1
        return self.weights

    def suspect_only_copy(self) -> None:
        self.alone += 1

    def take(self, given: Any, *, joins: bool, follow: Callable[[], None] | None = None) -> None:
        if follow is None:
            self.weights = given
        else:
            follow()
        self.taken.append((given, joins))

    def renew(self) -> None:
        if self.losses:
            raise self.losses.pop()


Next = Callable[["FakeMembership"], StateTransfer]


@dataclass
class FakeMembership(Membership):
    """Goes from one generation to the next as a list says; so do the other devices of this worker."""

    asked: list[int] = field(default_factory=list)
    refusals: int = 0
    here: FakeWorkers = field(default_factory=FakeWorkers)
    coming: list[Next] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)
    progress_told: list[MemberProgress] = field(default_factory=list)
    seconds: list[Mapping[str, float]] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    is_elastic: bool = True
    joins: bool = False
    is_due: bool = False

    @property
    def workers(self) -> Workers:  # type: ignore[override]
        return cast("Workers", self.here)

    def leave(self) -> bool:
        return True

    def regroup(self, lost: WorkerLost | None, progress: MemberProgress) -> StateTransfer:
        self.progress_told.append(progress)
        if not self.is_elastic:
            assert lost is not None
            raise lost
        return self.coming.pop(0)(self)

    def holds(self, acts: int) -> bool:
        self.asked.append(acts)
        self.refusals -= 1
        return self.refusals < 0

    def formed(self, seconds: Mapping[str, float]) -> None:
        self.joins = False
        self.seconds.append(seconds)

    def report_progress(self, progress: MemberProgress, samples_per_s: float, shard_s: float) -> None:
        pass

    def replace(self, generation: int, rank: int) -> None: ...

    def resize(self, workers: int) -> None:
        pass

    def finished(self, digest: str) -> None:
        pass

    def publish(self, name: str, value: Any) -> None:
        self.known[name] = value

    def published(self, name: str) -> Any:
        return self.known[name]

    def enter(self, loop: int) -> StateTransfer | None:
        self.entered.append(loop)
        return self.coming.pop(0)(self) if self.coming else None

    def await_end(self) -> NoReturn:
        raise SystemExit(0)

    def close(self) -> None:
        pass


def together_again(
    *acts: int, source: int = 0, rank: int = 0, told: Any = None, joiners: frozenset[int] = frozenset()
) -> Next:
    def arrive(membership: FakeMembership) -> StateTransfer:
        membership.here.rank, membership.here.told = rank, told
        return StateTransfer(source, acts, joiners, {"regroup": 0.25})

    return arrive


def fail_with(error: BaseException) -> Next:
    def arrive(membership: FakeMembership) -> StateTransfer:
        raise error

    return arrive


class Act:
    """An act that loses workers before it completes."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.calls = 0

    def __call__(self, workers: Workers) -> str:
        self.calls += 1
        if self.calls <= self.losses:
            raise WorkerLost(f"loss {self.calls}")
        return f"call {self.calls}"


def test_a_call_in_which_a_worker_is_lost_is_done_again_with_those_who_are_left() -> None:
    membership = FakeMembership(coming=[together_again(0, 0)])
    acts, act = CollectiveCalls(membership), Act(losses=1)
    assert acts.together(act) == "call 2"
    assert acts.done == 1
    assert membership.progress_told == [MemberProgress(0)]


def test_a_call_that_the_others_have_completed_is_taken_from_them_and_not_done_again() -> None:
    membership = FakeMembership(coming=[together_again(0, 1, source=1, told=[1, True, "theirs", "state", None])])
    recovery = FakeRecovery()
    acts, act = CollectiveCalls(membership, recovery), Act(losses=9)
    assert acts.together(act) == "theirs"
    assert (act.calls, acts.done, recovery.taken) == (1, 1, [("state", False)])


def test_a_call_that_another_device_of_this_worker_could_not_work_out_is_not_set_but_done_again() -> None:
    membership, made = FakeMembership(refusals=1, coming=[together_again(0, 0)]), list[int]()
    acts = CollectiveCalls(membership)
    acts.change(lambda workers: Change(lambda: made.append(acts.done)))
    assert (made, acts.done, membership.asked) == ([0], 1, [1, 1])
    assert membership.progress_told == [MemberProgress(0)]


def test_a_call_that_no_generation_gets_through_ends_though_nobody_is_lost() -> None:
    membership = FakeMembership(coming=[together_again(0, 0)] * MOST_FRUITLESS)
    acts, act = CollectiveCalls(membership), Act(losses=2 * MOST_FRUITLESS)
    with pytest.raises(WorkerLost, match=f"{MOST_FRUITLESS} generations in a row .* The last error: "):
        acts.together(act)
    assert len(membership.progress_told) == MOST_FRUITLESS


def test_what_is_lost_again_and_again_on_the_way_is_no_reason_to_end_while_calls_are_done() -> None:
    membership = FakeMembership(coming=[together_again(done, done) for done in range(3 * MOST_FRUITLESS)])
    acts = CollectiveCalls(membership)
    for _ in range(3 * MOST_FRUITLESS):
        acts.together(Act(losses=1))
    assert acts.done == 3 * MOST_FRUITLESS


def test_a_state_that_another_device_of_this_worker_was_not_given_is_not_taken() -> None:
    given = together_again(0, 1, source=1, told=[1, True, "theirs", "state", None])
    membership, recovery = FakeMembership(refusals=1, coming=[given, given]), FakeRecovery()
    assert CollectiveCalls(membership, recovery).together(Act(losses=1)) == "theirs"
    assert (recovery.taken, membership.asked) == ([("state", False)], [1, 1])
    assert membership.progress_told == [MemberProgress(0), MemberProgress(0)]


def test_of_a_state_that_one_worker_alone_hands_over_it_is_noted_that_nobody_else_had_it() -> None:
    recovery = FakeRecovery()
    acts = CollectiveCalls(FakeMembership(coming=[together_again(1, 0)]), recovery)
    acts.change(lambda workers: Change(lambda: None))
    acts.together(Act(losses=1))
    assert (recovery.given, recovery.alone) == (1, 1)


def test_a_state_that_the_newest_call_has_not_changed_is_not_handed_over() -> None:
    membership = FakeMembership(coming=[together_again(0, 1, source=1, told=[1, False, "theirs", None, None])])
    recovery = FakeRecovery()
    assert CollectiveCalls(membership, recovery).together(Act(losses=1)) == "theirs"
    assert recovery.taken == []


def test_a_joiner_is_given_the_state_though_the_newest_call_has_changed_none() -> None:
    recovery = FakeRecovery()
    acts = CollectiveCalls(FakeMembership(coming=[together_again(1, 0, joiners=frozenset([1]))]), recovery)
    acts.together(Act(losses=0))
    acts.together(Act(losses=1))
    assert recovery.given == 1


def test_a_call_that_was_taken_from_the_others_has_its_number_among_those_that_joiners_read() -> None:
    membership = FakeMembership(coming=[together_again(0, 1, source=1, told=[1, False, "theirs", None, None])])
    acts = CollectiveCalls(membership)
    acts.together(Act(losses=9))
    acts.together(Act(losses=0))
    assert membership.known == {"act/0/0": "theirs", "act/0/1": "call 1"}


def test_a_joiner_publishes_nothing_of_what_it_skips() -> None:
    membership = FakeMembership(joins=True)
    assert not CollectiveCalls(membership).enter(0)
    assert membership.known == {}


def test_a_new_generation_says_who_gives_what_to_whom() -> None:
    ranks = (
        Ranks(workers=1, shards=1, acts=4),
        Ranks(workers=1, shards=1, acts=5),
        Ranks(workers=1, shards=1, joins=True),
    )
    transfer = transfer_in(NewGeneration(generation=2, ranks=ranks, source=1), {})
    assert (transfer.source, transfer.behind) == (1, frozenset((0, 2)))
    assert StateTransfer(0, [0, 0], frozenset([1]), {}).behind == {1}, "a joiner is behind though nothing is done yet"


def test_whoever_has_come_furthest_gives_its_result_and_keeps_its_own() -> None:
    membership = FakeMembership(coming=[together_again(1, 0)])
    acts = CollectiveCalls(membership)
    assert acts.together(Act(losses=0)) == "call 1"
    assert acts.together(Act(losses=1)) == "call 2"
    assert acts.done == 2


def test_losing_another_worker_while_the_next_generation_forms_is_survived_too() -> None:
    membership = FakeMembership(coming=[fail_with(WorkerLost("again")), together_again(0)])
    acts = CollectiveCalls(membership)
    assert acts.together(Act(losses=1)) == "call 2"
    assert len(membership.progress_told) == 2


def test_losing_one_while_the_state_is_handed_over_leaves_this_worker_as_far_as_it_was() -> None:
    membership = FakeMembership(coming=[together_again(0, 1, source=1, told=[1, True, "theirs", "state", None])] * 2)
    acts = CollectiveCalls(membership)
    failures = iter([True, False])

    def broadcast(value: Any, source: int) -> Any:
        if next(failures):
            raise WorkerLost("in the middle of it")
        return membership.here.told

    membership.here.broadcast = broadcast  # type: ignore[method-assign]
    assert acts.together(Act(losses=9)) == "theirs"
    assert [progress.acts for progress in membership.progress_told] == [0, 0]


def test_losing_the_giver_when_its_state_is_here_does_not_apply_the_update_twice() -> None:
    taken = together_again(0, 1, source=1, told=[1, True, "theirs", 1, None])
    membership = FakeMembership(coming=[taken, together_again(1)])
    recovery = FakeRecovery(losses=[WorkerLost("the giver, as the engine is made")])
    acts = CollectiveCalls(membership, recovery)

    def add_one() -> str:
        recovery.weights += 1
        return "ours"

    def update(workers: Workers) -> Change[str]:
        if not membership.progress_told:
            raise WorkerLost("another one, in the middle of the act")
        return Change(add_one)

    assert acts.change(update) == "theirs"
    assert (recovery.weights, acts.done) == (1, 1)
    assert [progress.acts for progress in membership.progress_told] == [0, 1]


def test_what_is_told_of_a_change_is_told_when_it_is_counted() -> None:
    acts, seen = CollectiveCalls(FakeMembership()), list[tuple[str, int]]()
    acts.change(
        lambda workers: Change(lambda: seen.append(("made", acts.done)), lambda: seen.append(("told", acts.done)))
    )
    assert seen == [("made", 0), ("told", 1)]


def test_workers_that_were_started_together_end_together() -> None:
    acts = CollectiveCalls(FakeMembership(is_elastic=False))
    with pytest.raises(WorkerLost, match="loss 1"):
        acts.together(Act(losses=1))


def test_the_end_of_the_job_ends_the_act() -> None:
    acts = CollectiveCalls(FakeMembership(coming=[fail_with(JobEnded("the job is over"))]))
    with pytest.raises(JobEnded):
        acts.together(Act(losses=1))


def test_a_joiner_gets_the_results_of_calls_outside_of_loops_without_making_them() -> None:
    member = FakeMembership()
    acts = CollectiveCalls(member)
    acts.together(lambda workers: "before")
    acts.enter(0)
    acts.together(lambda workers: "inside")  # in the loop: whoever joins begins after it
    acts.leave(0)
    acts.together(lambda workers: "after")

    joiner = CollectiveCalls(FakeMembership(joins=True, known=member.known))
    never = Act(losses=9)
    assert joiner.together(never) == "before"
    assert not joiner.enter(0)
    assert joiner.together(never) == "after"
    assert never.calls == 0


def test_a_joiner_goes_on_where_its_source_stands() -> None:
    taken_in = together_again(7, 0, rank=1, told=[7, True, None, "state", None], joiners=frozenset([1]))
    membership = FakeMembership(joins=True, coming=[taken_in])
    acts = CollectiveCalls(membership)
    assert acts.enter(0)
    assert (acts.done, membership.joins) == (7, False)
    assert acts.together(Act(losses=0)) == "call 1"


def test_a_joiner_that_loses_its_source_waits_for_the_next_chance() -> None:
    taken_in = together_again(7, 0, rank=1, told=[7, True, None, "state", None], joiners=frozenset([1]))
    membership = FakeMembership(joins=True, coming=[fail_with(WorkerLost("the source")), taken_in])
    assert CollectiveCalls(membership).enter(2)
    assert membership.entered == [2, 2]


def test_a_joiner_that_has_the_state_and_loses_its_source_goes_on_as_a_member() -> None:
    taken_in = together_again(7, 0, rank=1, told=[7, True, None, "state", None], joiners=frozenset([1]))
    membership = FakeMembership(joins=True, coming=[taken_in, together_again(7)])
    acts = CollectiveCalls(membership, FakeRecovery(losses=[WorkerLost("the source, as the engine is made")]))
    assert acts.enter(2)
    assert (membership.entered, membership.joins) == ([2], False)
    assert [progress.acts for progress in membership.progress_told] == [7]


def test_a_joiner_with_another_model_is_refused() -> None:
    member = FakeMembership()
    CollectiveCalls(member).agree("model", {"layer": 1})
    with pytest.raises(JobMismatch, match="layer"):
        CollectiveCalls(FakeMembership(joins=True, known=member.known)).agree("model", {"layer": 2})


def test_every_member_makes_known_what_was_agreed_so_that_the_main_worker_may_be_lost_before_it_could() -> None:
    membership = FakeMembership(here=FakeWorkers(rank=1))
    acts = CollectiveCalls(membership)
    acts.together(lambda workers: "one")
    acts.together(lambda workers: "two")
    acts.enter(0)
    acts.leave(0)
    assert membership.known == {"act/0/0": "one", "act/0/1": "two", "loop/0": "over"}
