from typing import Any

import pytest
from pydantic import TypeAdapter

from membership_job import SHARDS, Job, training, with_joiner
from unisono.errors import JobError
from unisono.membership.messages import (
    AgentLeaving,
    Arrived,
    CheckpointDue,
    End,
    Finished,
    Formed,
    JobOver,
    Leaving,
    Lost,
    NewGeneration,
    Progress,
    Pulse,
    Ready,
    Refused,
    RegroupDue,
    Removed,
    Replace,
    ResizeRequest,
    Start,
    TurnedAway,
    Welcome,
    WorkerEnded,
)
from unisono.membership.state import (
    Bundle,
    CheckpointRequested,
    Disconnected,
    ElasticConfig,
    LeaveRequested,
    ReplaceRequested,
    ResizeRequested,
    Restarted,
    State,
    StopRequested,
    Tick,
    WorkerMessage,
    WriteJournal,
    find,
    next_deadline,
    status,
    why_no_checkpoint,
    why_not_replaced,
)

pytestmark = pytest.mark.unit

STATE: TypeAdapter[State] = TypeAdapter(State)
DIGEST = "0123abcd"


# -- the first generation


def test_an_agent_is_asked_for_as_many_workers_as_it_has_room_for() -> None:
    job = Job(largest=8).enlist(3)
    assert ("a", Start(workers=("w1", "w2", "w3"))) in job.told
    assert job.enlist(9, "b").told[-1] == ("b", Start(workers=("w4", "w5", "w6", "w7", "w8")))


def test_the_first_generation_is_formed_when_all_that_were_asked_for_are_ready() -> None:
    job = Job(smallest=2, largest=3).enlist(3).ready("w2", "w3")
    assert job.heard(NewGeneration) == []
    new = job.ready("w1").new_generation()
    assert job.heard(NewGeneration) == ["w1", "w2", "w3"]
    assert [seat.worker for seat in new.roster] == ["w1", "w2", "w3"]
    assert (new.generation, new.bounds, new.loop) == (1, (0, 3, 6, 8), None)
    assert not any(seat.joins for seat in new.roster)


def test_it_is_formed_without_those_that_have_ended_and_are_not_replaced() -> None:
    job = Job(smallest=2, largest=3).enlist(3).ready("w1", "w2")
    assert job.end("w3").heard(NewGeneration) == ["w1", "w2"]


def test_it_waits_for_agents_while_there_are_fewer_workers_than_needed() -> None:
    job = Job(smallest=3, largest=4).enlist(2).ready("w1", "w2")
    assert job.heard(NewGeneration) == []
    job.enlist(2, "b").ready("w3", "w4")
    assert job.roster == ["w1", "w2", "w3", "w4"]


def test_nobody_waits_longer_for_another_one_than_the_timeout() -> None:
    job = Job(smallest=1, largest=2).enlist(2).ready("w1").wait(9.9)
    assert job.state.minted is None
    job.wait(0.2)
    assert ("a", End(workers=("w2",), how="kill")) in job.told
    assert job.roster == ["w1"]


@pytest.mark.parametrize("has_connected", [False, True])
def test_signs_of_life_do_not_make_those_who_are_ready_wait_longer(has_connected: bool) -> None:
    job = Job(smallest=1, largest=2).enlist(2).ready("w1")
    alive = ["w1", "w2"] if has_connected else ["w1"]
    job.connect(*alive[1:])
    for _ in range(6):
        for worker in alive:
            job.hear(worker, Progress(acts=0, step=0))
        job.wait(2.0)
    assert job.roster == ["w1"]


def test_a_start_takes_as_long_as_it_takes_while_nobody_waits_for_it() -> None:
    job = Job().enlist(2).wait(1000.0)
    assert job.told == []
    assert job.ready("w1", "w2").roster == ["w1", "w2"]


def test_fewer_shards_than_the_fewest_workers_end_the_job_and_say_so() -> None:
    job = Job(smallest=4, largest=4).enlist(4).connect("w1", shards=2)
    assert "only 2 shards" in job.over.reason


def test_what_a_bundle_says_comes_to_the_same_as_its_messages_one_by_one() -> None:
    def said(worker: str) -> list[WorkerMessage]:
        """Its worker has formed the generation, and stands at the next boundary."""
        arrived = Arrived(generation=1, acts=5, loop=0, at_boundary=True, step=5)
        return [WorkerMessage((worker,), message) for message in (Formed(generation=1, seconds={"form": 0.5}), arrived)]

    one_by_one, bundled, at_once = with_joiner(3), with_joiner(3), with_joiner(3)
    events = [event for worker in ("w1", "w2", "w3") for event in said(worker)]
    for event in events:
        one_by_one.happen(event)
    bundled.happen(Bundle(events))
    at_once.happen(Bundle([WorkerMessage(("w1", "w2", "w3"), each.message) for each in said("w1")]))
    assert bundled.state.generation == 2
    assert bundled.state == one_by_one.state == at_once.state


def test_there_are_never_more_workers_than_shards() -> None:
    job = Job(largest=4).enlist(4).connect("w1", shards=3)
    assert job.told[-1] == ("a", End(workers=("w4",), how="leave"))
    for worker in ("w1", "w2", "w3"):
        job.connect(worker, shards=3).hear(worker, Ready())
    assert job.roster == ["w1", "w2", "w3"]


def test_a_worker_of_another_number_of_devices_is_refused_and_told_how_to_start_it() -> None:
    job = Job(devices=4).enlist(2).connect("w1", devices=4).connect("w2", devices=2)
    assert job.heard(Refused) == job.hung_up == ["w2"]
    (refused,) = (message for _, message in job.told if isinstance(message, Refused))
    assert "4 devices each, but 2 on host h: start them there with --devices-per-worker 4" in refused.reason


def test_a_worker_of_a_generation_that_nobody_has_formed_is_refused() -> None:
    job = training(2).connect("w1", generation=2)
    assert job.heard(Refused) == job.hung_up == ["w1"]
    assert training(2).connect("w1", generation=1).heard(Refused) == []


def test_a_worker_that_was_given_up_is_told_so_whatever_it_says() -> None:
    job = training(2).happen(Disconnected(worker="w2"))
    job.live("w1", seconds=12.0)
    assert job.state.workers["w2"].phase == "lost"
    for message in (Progress(acts=1, step=1), Leaving(), Ready()):
        assert job.hear("w2", message).heard(Refused) == job.hung_up == ["w2"]
    assert job.connect("w2", generation=1).heard(Refused) == job.hung_up == ["w2"]


def test_a_worker_that_nobody_asked_for_or_with_another_number_of_shards_is_refused() -> None:
    job = Job().enlist(2).connect("w1").connect("w2", shards=4)
    assert job.heard(Refused) == job.hung_up == ["w2"]
    assert job.connect("w7").heard(Refused) == job.hung_up == ["w7"]
    assert job.hear("w7", Progress(acts=1, step=1)).heard(Refused) == ["w7"]


# -- joining


def test_a_joiner_is_told_to_catch_up() -> None:
    assert training(2).enlist(3).connect("w3").told == [("w3", Welcome(joins=True))]


def test_a_new_generation_is_due_once_a_joiner_is_ready() -> None:
    job = with_joiner()
    assert job.heard(RegroupDue) == ["w1", "w2"]
    job.arrive("w1", "w2", acts=7)
    new = job.new_generation()
    assert [(seat.worker, seat.acts, seat.joins) for seat in new.roster] == [
        ("w1", 7, False),
        ("w2", 7, False),
        ("w3", 0, True),
    ]
    assert (new.generation, new.source, new.bounds) == (2, 0, (0, 3, 6, 8))
    assert new.roster[1].address == "w2:1"
    assert job.forgotten[-1] == 2


def test_joiners_come_in_the_order_in_which_they_became_ready() -> None:
    job = training(2).enlist(4).ready("w4", "w3", loop=0).arrive("w1", "w2")
    assert job.roster == ["w1", "w2", "w4", "w3"]


def test_nobody_joins_while_one_member_is_a_call_ahead() -> None:
    job = with_joiner().arrive("w1", acts=5).arrive("w2", acts=6)
    assert job.roster == ["w1", "w2"]
    assert job.new_generation().source == 1


def test_nobody_joins_away_from_a_boundary_and_the_next_boundary_is_due_at_once() -> None:
    job = with_joiner().arrive("w1").arrive("w2", at_boundary=False)
    assert job.roster == ["w1", "w2"]
    assert job.told[-2:] == [("w1", RegroupDue(generation=2)), ("w2", RegroupDue(generation=2))]


def test_nobody_stops_for_a_joiner_at_a_loop_that_is_over() -> None:
    job = training(2).hear("w1", Progress(acts=3, step=3, loop=1)).enlist(3).ready("w3", loop=0)
    assert job.heard(RegroupDue) == []
    assert job.hear("w3", Ready(loop=1)).heard(RegroupDue) == ["w1", "w2"]


def test_a_joiner_that_turns_out_to_be_behind_joins_in_the_next_loop() -> None:
    job = with_joiner().arrive("w1", "w2", loop=1)
    assert job.roster == ["w1", "w2"]
    assert job.heard(RegroupDue) == []
    assert job.hear("w3", Ready(loop=1)).heard(RegroupDue) == ["w1", "w2"]
    assert job.arrive("w1", "w2", loop=1, acts=9).roster == ["w1", "w2", "w3"]


def test_members_stop_once_for_a_joiner_that_is_further_and_then_when_they_are_there() -> None:
    job = with_joiner(loop=0).arrive("w1", "w2").enlist(4).ready("w4", loop=1)
    assert job.heard(RegroupDue) == ["w1", "w2", "w3"]
    assert job.arrive("w1", "w2", "w3", loop=0).heard(RegroupDue) == []
    assert job.roster == ["w1", "w2", "w3"]
    assert job.hear("w1", Progress(acts=9, step=9, loop=1)).heard(RegroupDue) == ["w1", "w2", "w3"]
    assert job.arrive("w1", "w2", "w3", acts=9, loop=1).roster == ["w1", "w2", "w3", "w4"]


def test_a_joiner_that_fails_does_not_end_what_works_wherever_its_script_stands() -> None:
    asked = training(2).enlist(3)
    refused = training(2).enlist(3).connect("w3", shards=SHARDS + 1)
    preparing = training(2).enlist(3).connect("w3")
    ready = with_joiner()
    for job in (asked, refused, preparing, ready):
        job.end("w3", 1, "ImportError: no such module")
        assert job.state.over is None
        assert job.notes[-1].event == "excluded"
        assert "code 1: ImportError: no such module" in job.notes[-1].fields["why"]
        assert job.state.departures == 0


def test_a_joiner_whose_script_never_takes_part_does_not_end_what_works() -> None:
    job = training(2).enlist(3).end("w3", 0)
    assert job.state.over is None
    assert "ended before the others'" in job.state.blame


def test_a_joiner_that_fails_over_what_it_is_given_does_not_end_what_works() -> None:
    job = with_joiner().arrive("w1", "w2").hear("w1", Formed(generation=2)).end("w3", 1, "ModelError: other shapes")
    assert job.state.over is None
    assert job.heard(Lost) == ["w1", "w2"]
    assert job.arrive("w1", "w2").roster == ["w1", "w2"]


@pytest.mark.parametrize("regrouped", [False, True])
def test_a_joiner_that_has_taken_part_ends_the_job_with_its_error_like_any_other(regrouped: bool) -> None:
    job = with_joiner().arrive("w1", "w2").hear("w3", Formed(generation=2))
    if regrouped:
        job.end("w2").arrive("w1", "w3", acts=7)
    assert "ValueError: wrong" in job.end("w3", 1, "ValueError: wrong").over.reason


@pytest.mark.parametrize("phase", ["asked", "ready", "working"])
def test_whoever_fails_before_the_first_generation_has_formed_ends_the_job(phase: str) -> None:
    job = Job().enlist(2)
    if phase != "asked":
        job.ready(*(["w1"] if phase == "ready" else ["w1", "w2"]))
    assert job.end("w1", 1, "ValueError: wrong").state.over is not None


def test_joiners_that_fail_again_and_again_leave_their_places_empty_and_cost_the_job_no_restart() -> None:
    job = training(2, max_restarts=3).enlist(3, "b")
    told = []
    for number in range(3, 100):
        if f"w{number}" in job.state.workers:
            job.end(f"w{number}", 1, "ImportError: no such module", agent="b")
            told += job.told
    events = [note.event for note in job.notes if note.event in ("lost", "excluded")]
    assert events == ["lost"] * 3 + ["excluded"] * 3
    assert (job.state.restarts, job.state.unreplaced, list(job.state.workers)) == (0, 0, ["w1", "w2"])
    assert [(name, message.places) for name, message in told if isinstance(message, TurnedAway)] == [
        ("b", 2), ("b", 1), ("b", 0)
    ]  # fmt: skip
    assert "no such module" in status(job.state)["excluded"][-1]["why"]
    assert job.end("w2").heard(Start) == ["a"], "restarts are left for those that took part"


def test_an_agent_whose_workers_were_turned_away_hears_so_again_and_when_that_is_over() -> None:
    job = training(2).enlist(1, "b").end("w3", 1, "ImportError: no such module", agent="b")
    (told,) = [message for _, message in job.enlist(1, "b").told if isinstance(message, TurnedAway)]
    assert "ImportError: no such module" in told.reason
    job.happen(ResizeRequested(3))
    assert ("b", TurnedAway(places=1)) in job.told
    assert job.heard(Start) == ["b"]


def test_who_takes_part_in_the_end_may_have_failed_before() -> None:
    job = training(2, max_restarts=1).enlist(3).end("w3", 1, "OSError: busy").ready("w4", loop=0).arrive("w1", "w2")
    job.hear("w4", Formed(generation=2)).end("w4").end("w5", 1, "OSError: busy")
    assert job.state.excluded == ()


def test_a_joiner_without_a_connection_is_not_taken_in() -> None:
    job = with_joiner().happen(Disconnected(worker="w3")).arrive("w1", "w2")
    assert job.roster == ["w1", "w2"]
    assert job.connect("w3").heard(RegroupDue) == ["w1", "w2"]


# -- losing


def test_the_others_are_told_of_a_loss_and_go_on_and_somebody_new_is_asked_for() -> None:
    job = training(3, max_restarts=1).end("w2")
    assert job.heard(Lost) == ["w1", "w3"]
    assert ("a", Start(workers=("w4",))) in job.told
    job.arrive("w1", acts=5, at_boundary=False)
    assert job.heard(NewGeneration) == []
    new = job.arrive("w3", acts=6, at_boundary=False).new_generation()
    assert [seat.worker for seat in new.roster] == ["w1", "w3"]
    assert new.source == 1
    assert [note.fields["lost"] for note in job.notes if note.event == "minted"][-1] == ["w2"]


def test_the_journal_says_how_long_each_joiner_took_until_it_was_ready() -> None:
    job = training(2, largest=3)
    job.enlist(1, "b")
    job.wait(4.5).ready("w3", loop=0).wait(3.0).arrive("w1", "w2")
    minted = [note.fields for note in job.notes if note.event == "minted"]
    assert [(each["joined"], each["ready"]) for each in minted] == [(["w1", "w2"], [0.0, 0.0]), (["w3"], [4.5])]


def test_a_member_that_arrives_unasked_makes_a_new_generation_due() -> None:
    job = training(3).arrive("w2", at_boundary=False)
    assert job.heard(RegroupDue) == ["w1", "w3"]
    assert job.arrive("w1", "w3", acts=6).roster == ["w1", "w2", "w3"]


def test_whoever_leaves_the_work_in_the_middle_wakes_those_who_may_wait_for_it_once() -> None:
    job = training(4).arrive("w2", at_boundary=False)
    assert job.heard(Lost) == ["w1", "w3", "w4"]
    assert job.arrive("w3", at_boundary=False).heard(Lost) == []
    assert job.arrive("w1", "w4", at_boundary=False).roster == ["w1", "w2", "w3", "w4"]
    assert job.arrive("w1", at_boundary=False).heard(Lost) == ["w2", "w3", "w4"]  # of the next generation


def test_whoever_could_not_form_a_generation_wakes_those_who_still_try() -> None:
    job = formed(training(3))
    assert job.arrive("w1").heard(Lost) == []
    job.arrive("w2", "w3")
    assert job.arrive("w3").heard(Lost) == ["w1", "w2"]
    job.happen(Disconnected(worker="w2")).connect("w2", generation=job.state.generation)
    assert job.heard(Lost) == ["w2"]


def formed(job: Job) -> Job:
    for member in job.state.members:
        job.hear(member.id, Formed(generation=job.state.generation))
    return job


def test_a_member_that_does_not_arrive_after_the_first_is_killed() -> None:
    job = training(3).arrive("w1", "w2")
    job.live("w3")
    assert ("a", End(workers=("w3",), how="kill")) in job.told
    assert job.roster == ["w1", "w2"]
    assert job.state.workers["w3"].phase == "lost"


def test_a_member_that_gives_no_sign_is_killed_and_the_others_are_told() -> None:
    job = training(2)
    job.live("w1")
    assert ("a", End(workers=("w2",), how="kill")) in job.told
    assert job.heard(Lost) == ["w1"]
    assert job.connect("w2", generation=1).heard(Refused) == ["w2"]


def beat(job: Job, **pulses: Pulse) -> Job:
    """The workers' next signs of life, a second later."""
    job.now += 1.0
    for worker, pulse in pulses.items():
        job.hear(worker, Progress(acts=1, step=1, pulse=pulse))
    return job


WAITS = Pulse(doing="wait", still_s=0.0)


@pytest.mark.parametrize("doing", ["call", "script"])
def test_a_member_that_comes_no_further_while_others_wait_for_it_hangs(doing: Any) -> None:
    job = beat(training(3), w1=WAITS, w2=Pulse(doing=doing, still_s=10.0), w3=WAITS)
    assert job.heard(Lost) == []
    job = beat(job, w1=WAITS, w3=WAITS, w2=Pulse(doing=doing, still_s=10.5))
    assert ("a", End(workers=("w2",), how="kill")) in job.told
    assert job.heard(Lost) == ["w1", "w3"]
    lost = next(note for note in job.notes if note.event == "lost")
    assert "hangs: no progress for 10 s" in lost.fields["why"]


def test_a_call_that_takes_long_for_the_first_time_is_no_slower_than_others_were_before() -> None:
    slow = Pulse(doing="call", still_s=25.0, longest_s=9.0)
    job = beat(training(2), w1=WAITS, w2=slow)
    assert job.heard(Lost) == []
    assert beat(job, w1=WAITS, w2=slow.model_copy(update={"still_s": 27.5})).heard(Lost) == ["w1"]


def test_the_script_may_take_its_time_while_nobody_waits_for_it() -> None:
    job = beat(training(2), w1=Pulse(still_s=500.0), w2=Pulse(still_s=500.0))
    assert job.heard(Lost) == []


def test_a_script_that_takes_its_time_hangs_as_soon_as_the_first_waits_for_it() -> None:
    job = beat(training(3), w1=Pulse(still_s=500.0), w2=Pulse(still_s=1.0), w3=Pulse(still_s=1.0))
    assert beat(job, w3=WAITS).heard(Lost) == ["w2", "w3"]


def test_a_member_alone_that_hangs_in_a_call_is_lost_too() -> None:
    job = beat(training(1, max_restarts=1), w1=Pulse(doing="call", still_s=11.0))
    assert ("a", End(workers=("w1",), how="kill")) in job.told


def test_members_that_all_wait_are_not_blamed() -> None:
    waits = Pulse(doing="wait", still_s=99.0)
    assert beat(training(2), w1=waits, w2=waits).heard(Lost) == []


# -- speed


def paces(job: Job, *seconds: float) -> Job:
    for number, each in enumerate(seconds, start=1):
        job.hear(f"w{number}", Progress(acts=1, step=1, pulse=Pulse(shard_s=each)))
    return job


def test_slower_workers_get_fewer_shards_once_that_pays() -> None:
    job = paces(training(3), 0.1, 0.1, 0.3).wait(4.0)
    assert job.heard(RegroupDue) == []
    paces(job, 0.1, 0.1, 0.3).wait(2.0)
    assert job.heard(RegroupDue) == ["w1", "w2", "w3"]
    job.arrive("w1", "w2").arrive("w3")
    assert job.minted.bounds == (0, 4, 7, 8)
    assert next(note for note in job.notes[::-1] if note.event == "minted").fields["shards"] == [4, 3, 1]
    assert paces(job, 0.1, 0.1, 0.3).wait(60.0).heard(RegroupDue) == []


def test_workers_that_are_about_as_fast_are_split_evenly() -> None:
    job = paces(training(3), 0.1, 0.11, 0.12).wait(6.0)
    assert job.heard(RegroupDue) == []
    assert job.end("w3").arrive("w1", "w2").new_generation().bounds == (0, 4, 8)


def test_without_figures_shards_are_split_evenly() -> None:
    assert paces(training(2), 0.0, 9.0).wait(60.0).heard(RegroupDue) == []


def test_a_newcomer_is_taken_to_be_as_fast_as_the_others() -> None:
    job = paces(with_joiner(2), 0.1, 0.4).arrive("w1", "w2")
    assert job.minted.bounds == (0, 5, 6, 8)


def test_what_a_script_asks_for_on_every_worker_is_noted_once() -> None:
    job = training(3, largest=4)
    for worker in ("w1", "w2", "w3"):
        job.hear(worker, ResizeRequest(workers=2))
    assert [note.fields["workers"] for note in job.notes if note.event == "resized"] == [2]


def test_a_member_is_replaced_once_all_ask_for_it_and_only_in_the_generation_that_is_meant() -> None:
    job = training(3)
    for worker in ("w1", "w2", "w3"):
        job.hear(worker, Replace(generation=1, rank=1))
    assert [note.fields["worker"] for note in job.notes if note.event == "replaced"] == ["w2"]
    job.arrive("w1", "w2", "w3")
    assert ("w2", "Removed") in [(name, type(message).__name__) for name, message in job.told]
    job.agent(WorkerEnded(worker="w2", code=0))
    assert job.state.size == 3
    assert [worker.id for worker in job.state.candidates] == ["w4"]
    job.hear("w1", Replace(generation=1, rank=0))
    assert [note.fields["worker"] for note in job.notes if note.event == "replaced"] == ["w2"]


def test_a_policy_cannot_replace_the_only_worker_for_the_job_would_leave_with_it() -> None:
    job = training(1).hear("w1", Replace(generation=1, rank=0))
    assert [note.event for note in job.notes][-1] == "not replaced"
    assert not job.state.workers["w1"].leaving
    assert job.heard(RegroupDue) == []


def test_a_member_that_computes_wrong_results_is_in_no_generation_wherever_the_others_stand() -> None:
    job = training(3).hear("w1", Replace(generation=1, rank=1))
    job.arrive("w1", "w3", at_boundary=False)
    job.arrive("w2", acts=9, at_boundary=False)
    assert job.roster == ["w1", "w3"]
    assert job.state.workers["w2"].phase == "removed"


def test_a_state_that_only_a_member_with_wrong_results_has_is_not_gone_on_from() -> None:
    job = training(3).hear("w2", Leaving()).hear("w1", Replace(generation=1, rank=1))
    job.agent(WorkerEnded(worker="w1", code=-9)).agent(WorkerEnded(worker="w3", code=-9))
    job.arrive("w2", at_boundary=False)
    assert job.state.minted is None
    assert "starts over" in [note.event for note in job.notes]


def test_a_generation_knows_how_many_were_lost_or_left_on_notice_before_it() -> None:
    job = training(4)
    job.agent(WorkerEnded(worker="w1", code=-9))
    job.hear("w2", Leaving()).hear("w2", Leaving())
    job.arrive("w2", "w3", "w4", at_boundary=False)
    assert job.minted.departures == 2
    job.happen(ResizeRequested(1)).arrive("w2", "w3", "w4")
    assert job.minted.departures == 2


def test_a_lost_worker_takes_its_room_until_it_has_ended() -> None:
    job = training(2, max_restarts=1).hear("w1", Progress(acts=1, step=1)).wait(5.0)
    job.hear("w1", Progress(acts=1, step=1)).wait(5.0)
    assert job.state.workers["w2"].phase == "lost"
    assert job.heard(Start) == []
    assert job.end("w2").told == [("a", Start(workers=("w3",)))]


def test_a_member_that_comes_back_in_time_is_not_lost_and_hears_what_it_missed() -> None:
    job = with_joiner().happen(Disconnected(worker="w1"))
    job.connect("w1", generation=1)
    assert job.told == [("w1", Welcome(joins=False)), ("w1", RegroupDue(generation=1))]
    job.arrive("w1").happen(Disconnected(worker="w1"))
    assert job.arrive("w2").heard(NewGeneration) == []
    assert job.connect("w1", generation=1).roster == ["w1", "w2", "w3"]
    job.happen(Disconnected(worker="w3")).connect("w3", generation=0)
    assert job.heard(NewGeneration) == ["w3"]
    job.end("w2").connect("w1", generation=2)
    assert job.told[-1] == ("w1", Lost(generation=2, workers=("w2",)))


def test_a_member_whose_connection_stays_away_is_lost() -> None:
    job = training(2).happen(Disconnected(worker="w2"))
    job.live("w1")
    assert job.heard(Lost) == ["w1"]


def test_a_broken_connection_is_no_sign_of_life() -> None:
    job = training(2).wait(0.0)
    for _ in range(4):  # silent for 8 s, then its connection is found to be dead
        job.hear("w1", Progress(acts=1, step=1)).wait(2.0)
    job.happen(Disconnected(worker="w2")).hear("w1", Progress(acts=1, step=1))
    assert job.wait(4.9).heard(Lost) == []
    assert job.hear("w1", Progress(acts=1, step=1)).wait(0.2).heard(Lost) == ["w1"]


def test_an_agent_whose_connection_is_dead_has_half_the_time_to_come_back() -> None:
    job = training(1).enlist(1, "b").wait(60.0)
    job.happen(Disconnected(agent="b"))
    assert "b" in job.hear("w1", Progress(acts=1, step=1)).wait(4.9).state.agents
    assert "b" not in job.hear("w1", Progress(acts=1, step=1)).wait(0.2).state.agents


def test_what_is_said_twice_counts_once() -> None:
    job = training(2).arrive("w1", "w2")
    assert job.state.generation == 2
    stale = Arrived(generation=1, acts=5, loop=0, at_boundary=True, step=5)
    assert job.hear("w1", stale).told == []
    assert job.hear("w1", Ready()).told == []
    assert job.state.workers["w1"].phase == "working"


def test_a_joiner_that_came_before_the_first_call_and_has_worked_since_has_the_weights() -> None:
    job = with_joiner().arrive("w1", "w2", acts=0).arrive("w1", "w2", "w3", acts=3)
    assert not any(seat.joins for seat in job.new_generation().roster)


def test_a_joiner_that_has_not_received_the_weights_is_no_source_and_stays() -> None:
    job = with_joiner().arrive("w1", "w2", acts=7).end("w1")
    new = job.arrive("w3", acts=0, at_boundary=False).arrive("w2", acts=7, at_boundary=False).new_generation()
    assert [(seat.worker, seat.acts, seat.joins) for seat in new.roster] == [("w2", 7, False), ("w3", 0, True)]
    assert new.source == 0


def test_a_joiner_that_lost_the_others_before_it_had_the_weights_may_wait_to_be_taken_in_once_more() -> None:
    job = with_joiner().arrive("w1", "w2", acts=7).end("w1").hear("w3", Ready(loop=0, generation=2, address="z"))
    assert job.heard(Lost) == ["w2"]
    assert job.arrive("w2", acts=7, at_boundary=False).roster == ["w2"]
    assert job.heard(RegroupDue) == ["w2"]
    assert job.arrive("w2", acts=8).roster == ["w2", "w3"]
    assert [note.fields["lost"] for note in job.notes if note.event == "minted"][-2:] == [["w1"], []]


def test_a_joiner_that_has_received_the_weights_is_a_member_like_any_other() -> None:
    job = with_joiner().arrive("w1", "w2", acts=7).end("w1").end("w2")
    new = job.arrive("w3", acts=7, at_boundary=False).new_generation()
    assert [(seat.worker, seat.acts, seat.joins) for seat in new.roster] == [("w3", 7, False)]


def test_the_job_starts_over_when_nobody_is_left_who_has_the_weights() -> None:
    job = with_joiner(max_restarts=5).arrive("w1", "w2", acts=7).end("w1").end("w2")
    job.arrive("w3", acts=0)
    assert job.heard(Removed) == ["w3"]
    assert job.forgotten[-1] is None
    job.end("w3", 0)
    assert job.state.minted is None
    assert job.connect("w4").told == [("w4", Welcome(joins=False))]


def test_the_job_starts_over_when_all_are_lost_and_no_number_is_used_again() -> None:
    job = training(2, max_restarts=5).end("w1").end("w2")
    assert job.forgotten[-1] is None
    started = [worker for worker in job.state.workers.values() if worker.phase == "asked"]
    assert [worker.id for worker in started] == ["w3", "w4"]
    job.ready("w3", "w4")
    assert (job.new_generation().generation, job.roster, job.new_generation().loop) == (2, ["w3", "w4"], None)


def test_joiners_cannot_start_a_job_over_and_are_replaced_at_no_cost() -> None:
    job = with_joiner(1, max_restarts=5).end("w1")
    assert job.heard(Removed) == ["w2"]
    assert job.end("w2", 0).state.restarts == 1
    assert job.ready("w3", "w4").roster == ["w3", "w4"]


# -- restarts


def test_workers_that_fail_at_once_make_the_next_ones_wait() -> None:
    job = Job(largest=1, max_restarts=100).enlist(1)
    delays = []
    for number in range(1, 11):
        job.end(f"w{number}")
        delays += [message.delay_s for _, message in job.told if isinstance(message, Start)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_worker_that_has_become_ready_ends_the_waiting() -> None:
    job = Job(largest=1, max_restarts=100).enlist(1).end("w1").end("w2").end("w3").ready("w4")
    assert job.end("w4").told[-1] == ("a", Start(workers=("w5",)))


def test_whoever_leaves_on_notice_and_is_lost_on_the_way_has_departed_once() -> None:
    job = training(3).hear("w3", Leaving())
    assert job.state.departures == 1
    assert job.end("w3").arrive("w1", "w2").new_generation().departures == 1
    assert job.end("w2").arrive("w1").new_generation().departures == 2


def test_without_restarts_the_survivors_go_on_and_the_last_loss_ends_the_job() -> None:
    job = training(2, largest=2).end("w2")
    assert job.heard(Start) == []
    assert job.arrive("w1").roster == ["w1"]
    over = job.end("w1").over
    assert "signal 9" in over.reason
    assert (job.heard(JobOver), over.digest, over.preempted) == (["a"], "", False)


def test_somebody_who_resizes_gets_workers_in_place_of_those_that_were_lost() -> None:
    job = training(2, largest=2).end("w2").arrive("w1")
    assert job.happen(ResizeRequested(2)).heard(Start) == ["a"]


def test_an_exception_of_the_script_ends_the_job_with_its_words() -> None:
    job = training(2, max_restarts=5).end("w2", 1, "ValueError: wrong")
    assert "w2 (rank 1) on host h: it ended with code 1: ValueError: wrong" in job.over.reason
    assert sorted(job.heard(JobOver)) == ["a", "w1", "w2"]


def test_an_exception_can_be_allowed_to_restart() -> None:
    job = training(2, max_restarts=5, restart_on_error=True).end("w2", 1, "ValueError: wrong")
    assert job.state.over is None
    assert job.heard(Start) == ["a"]


def test_scripts_that_all_end_well_before_they_train_end_the_job_well() -> None:
    job = Job(2).enlist(3).connect("w2")
    job.end("w1", 0)
    assert job.state.over is None  # the others may say more
    over = job.end("w2", 0).end("w3", 0).over
    assert (over.reason, over.digest) == ("", "")
    assert job.notes[-1].fields["outcome"] == "done"


@pytest.mark.parametrize("ready_first", [True, False])
def test_a_script_that_ends_well_where_others_would_train_ends_the_job(ready_first: bool) -> None:
    job = Job(2).enlist(3).connect("w2")
    job = job.ready("w2").end("w1", 0) if ready_first else job.end("w1", 0).ready("w2")
    assert "w1 on host host-a: its script ended before the others'" in job.over.reason


def test_a_script_that_fails_where_others_have_ended_before_they_train_is_to_blame() -> None:
    assert (
        "w2 on host host-a: it ended with code 1: ValueError: wrong"
        in Job(2).enlist(2).end("w1", 0).end("w2", 1, "ValueError: wrong").over.reason
    )


def test_a_script_that_ends_before_the_others_ends_the_job() -> None:
    assert "ended before the others'" in training(2, max_restarts=5).end("w2", 0).over.reason


# -- leaving, resizing, stopping


def test_a_member_leaves_at_the_next_boundary_and_is_not_replaced_there() -> None:
    job = training(3, max_restarts=5).hear("w2", Leaving())
    assert job.heard(RegroupDue) == ["w1", "w2", "w3"]
    job.arrive("w1", "w2", "w3")
    assert job.heard(Removed) == ["w2"]
    assert job.roster == ["w1", "w3"]
    assert job.end("w2", 0).told == []
    assert job.happen(ResizeRequested(3)).heard(Start) == ["a"]


def test_a_member_that_leaves_is_replaced_where_there_is_room_if_a_number_was_asked_for() -> None:
    job = training(2, wanted=2).enlist(2, "b").hear("w2", Leaving())
    assert job.heard(Start) == ["b"]


def test_nobody_leaves_away_from_a_boundary() -> None:
    job = training(2).hear("w2", Leaving()).arrive("w1", acts=5).arrive("w2", acts=6, at_boundary=False)
    assert job.roster == ["w1", "w2"]
    assert job.heard(RegroupDue) == ["w1", "w2"]


def test_a_rank_an_id_and_an_agent_can_be_asked_to_leave() -> None:
    job = training(3)
    assert job.happen(LeaveRequested("1")).state.workers["w2"].leaving
    assert job.happen(LeaveRequested("w3")).state.workers["w3"].leaving
    assert job.happen(LeaveRequested("nobody")).told == []
    assert job.happen(LeaveRequested("a")).state.agents["a"].leaving


def test_whoever_is_the_only_one_with_the_weights_leaves_once_another_one_has_them() -> None:
    job = with_joiner(1).arrive("w1", acts=7).hear("w1", Leaving()).arrive("w1", acts=7).arrive("w2", acts=0)
    assert job.roster == ["w1", "w2"]
    job.arrive("w1", "w2", acts=8)
    assert (job.roster, job.heard(Removed)) == (["w2"], ["w1"])


def test_when_all_leave_the_job_is_preempted_and_over_when_they_have_ended() -> None:
    job = training(2).happen(StopRequested())
    assert job.heard(RegroupDue) == ["w1", "w2"]
    job.arrive("w1", "w2")
    assert [message for _, message in job.told] == [Removed(reason="all were asked to leave", preempted=True)] * 2
    assert job.end("w1", 75).state.over is None
    assert job.end("w2", 75).over.preempted
    assert job.heard(JobOver) == ["a"]


def test_a_worker_that_is_to_be_replaced_leaves_and_another_one_is_started() -> None:
    job = training(2).happen(ReplaceRequested("1"))
    assert job.heard(RegroupDue) == ["w1", "w2"]
    job.arrive("w1", "w2")
    assert (job.roster, job.heard(Removed)) == (["w1"], ["w2"])
    assert job.end("w2", 0).heard(Start) == ["a"]
    assert job.state.size == 2


def test_a_worker_is_not_replaced_if_no_other_one_that_stays_has_the_weights() -> None:
    assert "w1 trains alone" in why_not_replaced(training(1).state, "w1")
    assert why_not_replaced(training(2).state, "w1") == ""
    assert "w1 trains alone" in why_not_replaced(training(2).happen(LeaveRequested("w2")).state, "0")
    assert why_not_replaced(Job().enlist(2).ready("w1").state, "w1") == ""  # it has nothing yet that could be lost


def test_a_worker_that_is_lost_while_it_is_to_be_replaced_is_replaced_once() -> None:
    job = training(2).happen(ReplaceRequested("1")).end("w2", -9)
    started = job.heard(Start)
    job.arrive("w1")
    assert [*started, *job.heard(Start)] == ["a"]
    assert job.state.size == 2


def test_whoever_asks_for_what_cannot_be_is_told_why() -> None:
    job = training(2)
    assert why_not_replaced(job.state, "1") == "" == why_no_checkpoint(job.state)
    assert "agent of a host" in why_not_replaced(job.state, "a")
    assert why_not_replaced(job.happen(ReplaceRequested("1")).state, "w2") == "w2 leaves already"  # twice in a row
    lost = training(2).end("w1", -9).state
    assert why_not_replaced(lost, "0") == "0 is gone already"  # the rank of a worker that has just died
    assert "nobody trains now" in why_no_checkpoint(lost)
    assert "the job stops" in why_not_replaced(training(2).happen(StopRequested()).state, "0")
    over = training(1).happen(StopRequested()).arrive("w1").end("w1", 75).state
    assert why_not_replaced(over, "w1") == "the job is over" == why_no_checkpoint(over)


def test_the_main_worker_alone_is_told_that_a_checkpoint_is_due() -> None:
    job = training(2).happen(CheckpointRequested())
    assert job.heard(CheckpointDue) == ["w1"]
    assert job.roster == ["w1", "w2"]


def test_nobody_is_asked_for_a_checkpoint_who_has_no_weights() -> None:
    assert Job().enlist(2).connect("w1").happen(CheckpointRequested()).heard(CheckpointDue) == []


def test_a_joiner_without_the_weights_is_not_asked_to_write_them() -> None:
    job = with_joiner(1).arrive("w1", acts=7).happen(StopRequested()).arrive("w1", acts=7).arrive("w2", acts=0)
    assert [(name, message.preempted) for name, message in job.told if isinstance(message, Removed)] == [
        ("w1", True),
        ("w2", False),
    ]


def test_a_place_that_somebody_has_left_is_filled_again_if_the_job_could_not_begin_otherwise() -> None:
    job = Job(smallest=2, largest=2).enlist(2).ready("w1", "w2").hear("w2", Leaving())
    job.arrive("w1", "w2").end("w2", 0)
    assert (job.roster, job.heard(Start)) == (["w1"], [])
    assert job.end("w1").heard(Start) == ["a"]
    assert job.state.size == 2


def test_a_checkpoint_on_the_way_out_may_take_its_time() -> None:
    job = training(1).happen(StopRequested()).arrive("w1")
    for _ in range(20):
        assert job.hear("w1", Progress(acts=5, step=5)).wait(9.0).told == []
    assert job.wait(1.0).told == [("a", End(workers=("w1",), how="kill"))]


def test_a_removed_worker_that_does_not_end_is_killed() -> None:
    job = training(3).happen(ResizeRequested(2)).arrive("w1", "w2", "w3")
    assert job.heard(Removed) == ["w3"]
    job.live("w1", "w2")
    assert job.told == [("a", End(workers=("w3",), how="kill"))]
    assert job.state.unreplaced == 0


def test_a_job_that_is_stopped_before_it_trains_is_over_when_its_workers_have_ended() -> None:
    job = Job().enlist(2).connect("w1").happen(StopRequested())
    assert job.heard(Removed) == ["w1"]
    assert job.heard(End) == ["a"]
    assert job.end("w1", 0).end("w2", -15).over.preempted


def test_the_only_agent_takes_the_job_with_it() -> None:
    job = training(2).agent(AgentLeaving()).arrive("w1", "w2")
    assert all(message.preempted for _, message in job.told if isinstance(message, Removed))
    job.end("w1", 75).end("w2", 75)
    assert job.state.over is not None


def test_an_agent_without_room_takes_the_job_with_it_since_it_keeps_the_coordinator() -> None:
    job = Job().enlist(0).enlist(2, "b").ready("w1", "w2").agent(AgentLeaving(), "a").arrive("w1", "w2")
    assert all(message.preempted for _, message in job.told if isinstance(message, Removed))
    job.end("w1", 75, agent="b").end("w2", 75, agent="b")
    assert job.over.preempted


def test_one_of_two_agents_leaves_alone() -> None:
    job = Job().enlist(1).enlist(1, "b").ready("w1", "w2").agent(AgentLeaving(), "b").arrive("w1", "w2")
    assert (job.roster, job.heard(Removed)) == (["w1"], ["w2"])
    job.end("w2", 0, agent="b")
    assert job.heard(JobOver) == ["b"]
    assert job.state.over is None


def test_an_agent_that_has_left_and_is_started_again_under_its_id_gets_workers_again() -> None:
    job = Job().enlist(1).enlist(1, "b").ready("w1", "w2").agent(AgentLeaving(), "b").arrive("w1", "w2")
    job.end("w2", 75, agent="b")
    assert job.heard(JobOver) == ["b"]
    job.enlist(1, "b")
    assert [told for told in job.told if told[0] == "b" and isinstance(told[1], Start)] == [
        ("b", Start(workers=("w3",)))
    ]


def test_an_agent_that_is_leaving_stays_so_when_its_connection_comes_back() -> None:
    job = Job().enlist(1).enlist(1, "b").ready("w1", "w2").agent(AgentLeaving(), "b").enlist(1, "b")
    assert job.state.agents["b"].leaving


def test_an_agent_that_died_and_is_started_again_under_its_id_says_that_its_workers_are_lost() -> None:
    job = Job().enlist(1).enlist(1, "b").ready("w1", "w2").happen(Disconnected("w2", "")).enlist(1, "b", running=())
    assert job.state.workers.get("w2") is None or job.state.workers["w2"].phase == "lost"


def test_shrinking_first_sends_away_who_is_not_in_yet_and_then_the_end_of_the_roster() -> None:
    job = with_joiner(3).happen(ResizeRequested(2))
    assert job.heard(Removed) == ["w4"]
    job.arrive("w1", "w2", "w3")
    assert (job.roster, job.heard(Removed)) == (["w1", "w2"], ["w3"])


def test_a_size_out_of_range_is_brought_into_it() -> None:
    job = training(3, smallest=2, largest=4)
    assert job.happen(ResizeRequested(9)).state.size == 4
    assert job.hear("w1", ResizeRequest(workers=1)).state.size == 2
    assert job.notes[-1].fields == {"workers": 2, "before": 4, "asked_for": 1, "by": "w1"}


def test_growing_asks_for_more_workers_where_there_is_room() -> None:
    job = training(2, wanted=2, largest=5).enlist(4)
    assert job.happen(ResizeRequested(4)).told == [("a", Start(workers=("w3", "w4")))]


# -- the end


def done(main: str, *finished: str) -> JobOver:
    return JobOver(digest=DIGEST, main=main, main_agent="a", finished=finished, agents=("a",))


def test_the_job_is_done_when_all_have_finished() -> None:
    job = training(2).hear("w1", Finished(digest=DIGEST))
    assert job.state.over is None
    job.hear("w2", Finished(digest=DIGEST))
    assert job.state.over == done("w1", "w1", "w2")
    assert job.heard(JobOver) == ["w1", "w2", "a"]


def test_different_weights_at_the_end_are_an_error() -> None:
    assert "w1 a, w2 b" in training(2).hear("w1", Finished(digest="a")).hear("w2", Finished(digest="b")).over.reason


def test_a_job_is_done_though_one_is_lost_when_the_others_have_finished() -> None:
    job = training(2, max_restarts=5).hear("w1", Finished(digest=DIGEST)).end("w1", 0).end("w2")
    assert job.state.over == done("w1", "w1")


def test_the_main_worker_is_told_of_though_it_is_lost_when_the_others_have_finished() -> None:
    job = training(3, max_restarts=5).hear("w3", Finished(digest=DIGEST)).end("w1")
    assert job.hear("w2", Finished(digest=DIGEST)).state.over == done("w1", "w2", "w3")


def test_those_that_missed_the_end_compute_it_again_without_those_that_have_finished() -> None:
    job = training(3).hear("w1", Finished(digest=DIGEST)).end("w3")
    job.arrive("w2", at_boundary=False)
    assert job.roster == ["w2"]
    assert job.hear("w2", Finished(digest=DIGEST)).state.over == done("w2", "w1", "w2")


def test_an_exception_after_the_run_is_one_of_the_script_too() -> None:
    assert "KeyError" in training(2).hear("w1", Finished(digest=DIGEST)).end("w1", 1, "KeyError: 'x'").over.reason


def test_who_is_still_on_the_way_when_the_job_is_done_is_ended_since_nobody_will_be_there_to_tell_it() -> None:
    job = training(2, max_restarts=5).end("w2").hear("w1", Finished(digest=DIGEST))
    assert job.state.over == done("w1", "w1")
    assert ("a", End(workers=("w3",), how="drop")) in job.told


def test_whoever_connects_to_a_job_that_is_over_is_told_so() -> None:
    job = training(1).hear("w1", Finished(digest=DIGEST))
    assert job.connect("w1").told == [("w1", done("w1", "w1"))]
    assert job.enlist(1, "b").told == [("b", done("w1", "w1"))]
    assert job.happen(ResizeRequested(3)).told == []
    assert next_deadline(job.state) is None


# -- agents come and go


def test_the_workers_of_a_lost_agent_are_lost_and_need_no_restarts() -> None:
    job = Job(max_restarts=0).enlist(1).enlist(2, "b").ready("w1", "w2", "w3").happen(Disconnected(agent="b"))
    job.live("w1", "w2", "w3")
    assert job.heard(Lost).count("w1") == 2
    assert job.arrive("w1").roster == ["w1"]
    assert job.enlist(2, "c").told[-1] == ("c", Start(workers=("w4", "w5")))
    assert job.enlist(2, "b", running=("w2", "w3")).told[1] == ("b", End(workers=("w2", "w3"), how="kill"))


def test_an_agent_that_comes_back_says_who_is_still_there() -> None:
    job = training(3, max_restarts=5).happen(Disconnected(agent="a")).enlist(3, running=("w1", "w3", "w9"))
    assert ("a", End(workers=("w9",), how="kill")) in job.told
    assert job.heard(Lost) == ["w1", "w3"]
    assert job.arrive("w1", "w3").roster == ["w1", "w3"]


def test_a_worker_that_was_never_started_for_want_of_a_connection_is_asked_for_again_at_no_cost() -> None:
    job = Job(max_restarts=0).enlist(1).happen(Disconnected(agent="a")).enlist(1, running=())
    assert job.told[-1] == ("a", Start(workers=("w2",)))
    assert job.state.unreplaced == 0


# -- the coordinator


def test_a_coordinator_that_starts_again_goes_on_from_its_state() -> None:
    job = with_joiner().arrive("w1")
    job.state = STATE.validate_json(STATE.dump_json(job.state))
    job.now = 3.0  # of another clock
    job.happen(Restarted()).enlist(3, running=("w1", "w2", "w3"))
    job.connect("w1", "w2", generation=1).ready("w3", loop=0)
    assert job.arrive("w2").roster == ["w1", "w2", "w3"]


def test_a_coordinator_that_starts_again_forgets_what_it_may_not_have_come_to() -> None:
    for job, below in ((training(2), 1), (training(1).end("w1"), None)):
        job.forgotten.clear()
        assert job.happen(Restarted()).forgotten == [below]


def test_whoever_does_not_come_back_to_a_restarted_coordinator_is_lost() -> None:
    job = training(3).happen(Restarted()).connect("w1", "w2", generation=1)
    job.enlist(3, running=("w1", "w2", "w3"))
    job.live("w1", "w2")
    assert job.heard(Lost) == ["w1", "w2"]


def test_whoever_had_arrived_and_does_not_come_back_to_a_restarted_coordinator_is_lost() -> None:
    job = training(2).arrive("w1").happen(Restarted()).enlist(2, running=("w1", "w2"))
    assert job.connect("w2", generation=1).arrive("w2").heard(NewGeneration) == []
    job.wait(10.1)
    assert job.roster == ["w2"]


def test_after_a_restart_of_the_coordinator_whoever_has_yet_to_arrive_has_the_whole_timeout_again() -> None:
    job = training(2).arrive("w1").wait(9.0)
    job.happen(Restarted()).enlist(2, running=("w1", "w2")).connect("w1", "w2", generation=1)
    assert job.wait(9.0).heard(End) == []
    assert job.wait(1.1).heard(End) == ["a"]


def test_a_coordinator_that_was_held_up_blames_nobody() -> None:
    job = training(2).happen(Tick(), after=1000.0)
    assert job.told == []
    assert job.wait(9.9).told == []
    assert job.wait(0.2).heard(End) == ["a", "a"]


def test_the_next_deadline_is_near_enough_to_notice_being_held_up() -> None:
    job = training(2)
    assert next_deadline(job.state) == job.now + 2.5
    assert next_deadline(State(settings=ElasticConfig())) is None


# -- words for people


def test_the_status_says_who_takes_part_and_how_far_they_are() -> None:
    job = with_joiner().hear("w2", Progress(acts=4, step=4, samples_per_s=99.5))
    found = status(job.state)
    assert (found["generation"], found["phase"], found["wanted"]) == (1, "regrouping", 3)
    member = found["members"][1]
    assert (member["id"], member["rank"], member["step"], member["samples_per_s"]) == ("w2", 1, 4, 99.5)
    assert [other["id"] for other in found["others"]] == ["w3"]
    assert [find(job.state, who) for who in ("0", "w3", "a", "2", "")] == ["w1", "w3", "a", None, None]


def test_the_journal_says_what_forming_took_by_the_slowest_member() -> None:
    job = training(2).hear("w1", Formed(generation=1, seconds={"form": 0.25, "copy": 0.0}))
    assert job.notes[-1].event == "minted"
    job.hear("w2", Formed(generation=1, seconds={"form": 0.125, "copy": 0.5}))
    assert job.notes[-1] == WriteJournal("formed", {"generation": 1, "seconds": {"form": 0.25, "copy": 0.5}})


@pytest.mark.parametrize(
    "settings", [(0, 1), (3, 2), (1, 2, 3), (2, 3, 1), (1, 1, None, -1), (1, 1, None, 0, False, 0.0)]
)
def test_settings_that_contradict_each_other_are_refused(settings: tuple[Any, ...]) -> None:
    with pytest.raises(JobError):
        ElasticConfig(*settings)
