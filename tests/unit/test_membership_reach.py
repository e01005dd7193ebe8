"""Hosts that do not reach each other: who is probed, who is told, who is left out, and that the others go on."""

from typing import Any, Self

import pytest

from membership_job import Job
from unisono.membership import messages
from unisono.membership.state import Disconnected, LeaveRequested, ResizeRequested, Restarted, next_deadline, status
from unisono.membership.state.reach import FRESH_S

pytestmark = pytest.mark.unit

TIMEOUT_S = 10.0


def lacking(*agents: str) -> tuple[messages.Unreached, ...]:
    return tuple(messages.Unreached(agent=agent, why="timed out") for agent in agents)


class Network(Job):
    """A job on hosts that answer probes."""

    def come(self, agent: str, workers: int = 1, running: tuple[str, ...] = ()) -> Self:
        hello = messages.AgentHello(
            agent=agent, host=f"host-{agent}", workers=workers, running=running, probes=f"{agent}:7"
        )
        self.agent(hello, agent)
        return self

    def probed(self) -> dict[str, list[str]]:
        """Who was asked by the last event to probe whom."""
        found = [(name, message) for name, message in self.told if isinstance(message, messages.Probe)]
        return {name: [target.agent for target in message.targets] for name, message in found}

    def reaches(self, agent: str, *others: str) -> Self:
        self.agent(messages.Probed(reached=others), agent)
        return self

    def fails(self, agent: str, *others: str) -> Self:
        self.agent(messages.Probed(unreached=lacking(*others)), agent)
        return self

    def work(self, *workers: str) -> Self:
        for worker in workers:
            self.hear(worker, messages.Formed(generation=self.state.generation))
        return self

    def stop(self, worker: str, *unreached: str, acts: int = 5) -> Self:
        """It arrives, since it did not reach these."""
        where: dict[str, Any] = {
            "generation": self.state.generation,
            "acts": acts,
            "loop": 0,
            "at_boundary": True,
            "step": acts,
        }
        self.hear(worker, messages.Arrived(**where, unreached=lacking(*unreached)))
        return self

    def train(self, seconds: float) -> Self:
        """Time passes, in which members give signs of life."""
        told = []
        for _ in range(10):
            for member in self.state.members:
                self.hear(member.id, messages.Progress(acts=5, step=5))
            self.wait(seconds / 10)
            told += self.told
        self.told = told
        return self

    def join(self, worker: str) -> Self:
        self.ready(worker, loop=0)
        return self

    @property
    def journal(self) -> list[str]:
        return [note.event for note in self.notes]


def at_work(*hosts: tuple[str, int], **settings: Any) -> Network:
    """A job whose hosts, each with so many workers, have formed a generation."""
    job = Network(**settings)
    for agent, workers in hosts:
        job.come(agent, workers)
    names = [worker.id for worker in job.state.workers.values()]
    job.ready(*names)
    assert job.roster == names
    job.work(*names)
    return job


def with_stranger() -> Network:
    """A job at work on one host, and a second host that was asked to probe it."""
    job = at_work(("a", 1))
    job.come("b")
    return job


def test_a_host_that_comes_probes_the_members_before_any_worker_is_started_there() -> None:
    job = with_stranger()
    assert job.probed() == {"b": ["a"]}
    assert job.heard(messages.Start) == []
    assert job.reaches("b", "a").heard(messages.Start) == ["b"]


def test_a_host_that_does_not_reach_the_members_is_told_why_and_what_to_do_and_nobody_stops() -> None:
    job = with_stranger().fails("b", "a")
    ((name, told),) = job.told
    assert name == "b"
    assert isinstance(told, messages.LeftOut)
    assert "host-b does not reach host-a at a:7: timed out" in told.reason
    assert "GLOO_SOCKET_IFNAME" in told.reason
    assert job.journal[-2:] == ["no connection", "left out"]
    assert [agent["left_out"] for agent in status(job.state)["agents"]] == [
        "",
        "host-b does not reach host-a at a:7: timed out",
    ]
    assert job.state.generation == 1
    assert job.state.due_since is None
    assert job.state.size == 1


def test_it_is_probed_again_and_takes_part_as_soon_as_it_can() -> None:
    job = with_stranger().fails("b", "a")
    assert job.train(TIMEOUT_S / 2).probed() == {}
    assert job.train(TIMEOUT_S).probed() == {"b": ["a"]}
    job.fails("b", "a")
    assert job.journal.count("left out") == 1
    assert job.heard(messages.LeftOut) == []
    job.train(TIMEOUT_S * 1.5).reaches("b", "a")
    assert job.heard(messages.Start) == ["b"]
    assert ("b", messages.LeftOut()) in job.told
    assert job.journal[-3:-1] == ["connected again", "not left out any more"]


def test_hosts_of_members_are_not_probed_and_a_late_answer_disturbs_no_members() -> None:
    job = at_work(("a", 1), ("b", 1))
    assert job.probed() == {}
    job.fails("b", "a").train(2 * TIMEOUT_S)
    assert not job.state.agents["b"].unreached
    assert not job.state.agents["b"].left_out
    assert job.state.due_since is None


def test_an_old_probe_is_repeated_before_members_stop_for_a_joiner() -> None:
    job = with_stranger().reaches("b", "a")
    job.connect("w2")
    job.train(TIMEOUT_S).join("w2")
    assert job.probed() == {"b": ["a"]}
    assert job.heard(messages.RegroupDue) == []
    assert job.reaches("b", "a").heard(messages.RegroupDue) == ["w1"]


def test_a_joiner_whose_host_is_cut_off_meanwhile_goes_and_the_members_do_not_stop() -> None:
    job = with_stranger().reaches("b", "a")
    job.connect("w2")
    job.train(TIMEOUT_S).join("w2").fails("b", "a")
    assert job.heard(messages.RegroupDue) == []
    assert job.heard(messages.Removed) == ["w2"]
    assert job.state.due_since is None
    assert [one["why"] for one in status(job.state)["excluded"]] == ["host-b does not reach host-a at a:7: timed out"]


def test_an_agent_that_connects_again_is_asked_again() -> None:
    job = with_stranger()
    job.happen(Disconnected(agent="b")).happen(Restarted())
    job.come("a", running=("w1",)).connect("w1", generation=1)
    assert job.come("b").probed() == {"b": ["a"]}


def test_a_host_with_another_address_is_probed_again_at_once() -> None:
    job = with_stranger().fails("b", "a")
    moved = messages.AgentHello(agent="b", host="host-b", workers=1, probes="elsewhere:7")
    job.agent(moved, "b")
    assert job.probed() == {"b": ["a"]}
    assert not job.state.agents["b"].left_out


def test_before_the_first_generation_nobody_is_probed_and_its_forming_tells() -> None:
    job = Network(smallest=2).come("a", 1).come("b", 1)
    assert (job.probed(), job.heard(messages.Start)) == ({}, ["b"])
    job.ready("w1", "w2").stop("w1", "b", acts=0).stop("w2", "a", acts=0)
    assert (job.roster, job.heard(messages.Removed)) == (["w1"], ["w2"])
    assert job.state.agents["b"].left_out
    job.end("w2", code=0, agent="b").work("w1")
    assert job.train(1.5 * TIMEOUT_S).probed() == {"b": ["a"]}
    assert job.reaches("b", "a").heard(messages.Start) == ["b"]


def test_a_host_is_probed_again_only_where_somebody_trains() -> None:
    job = at_work(("a", 1), max_restarts=9)
    job.come("b").fails("b", "a").end("w1")
    deadline = next_deadline(job.state)
    assert deadline is not None
    assert deadline <= job.now + TIMEOUT_S
    job.wait(1.5 * TIMEOUT_S)
    assert (job.probed(), job.heard(messages.Start)) == ({}, ["b"])


def test_a_host_that_answers_no_probes_is_tried_again_where_that_stops_nobody() -> None:
    job = Network(smallest=2, max_restarts=9).come("a", 1)
    job.enlist(1, "b").ready("w1", "w2").work("w1", "w2")
    job.stop("w1").stop("w2").stop("w1").stop("w2", "a")
    assert (job.roster, job.heard(messages.Removed)) == (["w1"], ["w2"])
    assert job.end("w2", 0, agent="b").train(3 * TIMEOUT_S).heard(messages.Start) == []
    job.end("w1").ready("w3")
    assert job.wait(1.5 * TIMEOUT_S).heard(messages.Start) == ["b"]


def test_an_agent_that_says_nothing_about_a_probe_is_left_out_in_the_end() -> None:
    job = with_stranger()
    job.train(2.2 * TIMEOUT_S)
    assert "its agent has not said" in job.state.agents["b"].left_out
    assert job.train(TIMEOUT_S).probed() == {"b": ["a"]}
    assert not job.state.agents["a"].left_out


def test_where_members_do_not_reach_each_other_the_fewest_go_with_their_reason() -> None:
    job = at_work(("a", 1), ("b", 2), ("c", 2))
    job.stop("w1").stop("w2").stop("w3").stop("w4").stop("w5")
    job.stop("w1", "b", "c").stop("w2", "a").stop("w3").stop("w4").stop("w5")
    assert job.roster == ["w2", "w3", "w4", "w5"]
    assert job.heard(messages.Removed) == ["w1"]
    (excluded,) = [note.fields for note in job.notes if note.event == "excluded"]
    assert (excluded["worker"], excluded["host"], excluded["rank"]) == ("w1", "h", 0)
    assert "host-a does not reach host-b at b:7: timed out" in excluded["why"]
    assert job.journal[-4:] == ["not formed", "excluded", "left", "minted"]


@pytest.mark.parametrize("ahead", ["w1", "w2"])
def test_of_two_halves_the_one_that_came_last_goes_though_its_state_is_the_newest(ahead: str) -> None:
    job = at_work(("a", 1), ("b", 2), max_restarts=9)
    job.end("w3", agent="b").connect("w4")
    job.stop("w1", "b", acts=5 + (ahead == "w1")).stop("w2", "a", acts=5 + (ahead == "w2"))
    assert job.roster == ["w1"]
    assert [one.worker for one in job.state.excluded] == ["w4", "w2"]


def test_whoever_holds_the_weights_stays_against_any_number_of_joiners() -> None:
    job = at_work(("a", 1))
    job.come("b", 3).reaches("b", "a").join("w2")
    job.join("w3").join("w4").stop("w1")
    assert job.roster == ["w1", "w2", "w3", "w4"]
    job.stop("w1", "b", acts=5)
    for joiner in ("w2", "w3", "w4"):
        job.hear(joiner, sized_by("a"))
    assert job.roster == ["w1"]
    assert sorted(one.worker for one in job.state.excluded) == ["w2", "w3", "w4"]


def test_whoever_does_not_reach_only_those_that_go_stays() -> None:
    job = at_work(*((host, 1) for host in "vxyzabc"))
    job.stop("w1", "a", "b", "c").stop("w2", "a").stop("w3", "b").stop("w4", "c")
    job.stop("w5").stop("w6").stop("w7")
    assert [agent.id for agent in job.state.agents.values() if agent.left_out] == ["a", "b", "c"]
    assert job.roster == ["w1", "w2", "w3", "w4"]


def joined(*hosts: str) -> Network:
    """A job of one worker that others have joined, each from a host of its own."""
    job = at_work(("a", 1), largest=9)
    for number, host in enumerate(hosts, 2):
        job.come(host).reaches(host, "a").join(f"w{number}")
    job.stop("w1")
    assert len(job.roster) == len(hosts) + 1
    return job


def sized_by(*others: str) -> messages.Ready:
    """What a joiner says that did not reach these."""
    return messages.Ready(loop=0, generation=2, unreached=lacking(*others))


def test_joiners_probe_no_joiners_and_the_last_of_those_goes_that_do_not_reach_each_other() -> None:
    job = joined("b", "c")
    job.stop("w1").hear("w2", sized_by("c")).hear("w3", sized_by("b"))
    assert job.state.agents["c"].left_out == "host-b does not reach host-c at c:7: timed out"
    assert [one.worker for one in job.state.excluded] == ["w3"]
    job.reaches("b", "a").work("w1").stop("w1", acts=7)
    assert job.roster == ["w1", "w2"]
    job.work("w1", "w2").end("w3", code=0, agent="c")
    assert job.train(1.5 * TIMEOUT_S).probed() == {"c": ["a", "b"]}
    assert job.reaches("c", "a").heard(messages.Start) == []
    assert job.reaches("c", "b").heard(messages.Start) == ["c"]


def test_of_joiners_the_one_goes_that_most_gaps_name() -> None:
    job = joined("b", "c", "d")
    job.stop("w1").hear("w2", sized_by("c", "d")).hear("w3", sized_by()).hear("w4", sized_by())
    assert [agent.id for agent in job.state.agents.values() if agent.left_out] == ["b"]


def test_whoever_is_left_out_for_a_joiner_that_never_trains_is_tried_again() -> None:
    job = joined("b", "c")
    job.stop("w1").hear("w2", sized_by("c")).hear("w3", sized_by("b"))
    job.happen(ResizeRequested(1)).end("w2", code=0, agent="b").end("w3", code=0, agent="c").work("w1")
    assert job.state.agents["c"].left_out
    assert job.train(1.5 * TIMEOUT_S).probed() == {"c": ["a"]}
    assert not job.state.agents["c"].left_out


def test_a_probe_of_a_host_that_is_gone_is_waited_for_no_longer() -> None:
    job = at_work(("a", 1), ("b", 1), max_restarts=9)
    job.come("c").reaches("c", "a").end("w2", agent="b").happen(Disconnected(agent="b"))
    assert job.state.agents["c"].probing == ("b",)
    assert "c" in job.train(1.1 * TIMEOUT_S).heard(messages.Start)
    assert "b" not in job.state.agents
    assert not job.state.agents["c"].probing


def test_a_host_that_leaves_stands_in_nobodys_way() -> None:
    job = with_stranger().fails("b", "a")
    job.come("c").reaches("c", "a").join("w2").stop("w1").work("w1", "w2")
    job.happen(LeaveRequested("a")).stop("w1", acts=6).stop("w2", acts=6)
    assert job.roster == ["w2"]
    job.end("w1", code=0).train(FRESH_S + 1)
    assert job.state.agents["a"].left
    assert not job.state.agents["b"].left_out


def test_hosts_that_wait_probe_those_that_begin_to_train() -> None:
    job = at_work(("a", 1), wanted=2)
    job.come("b").reaches("b", "a")
    job.come("c").reaches("c", "a").join("w2").stop("w1")
    assert job.roster == ["w1", "w2"]
    assert job.probed() == {"c": ["a", "b"]}


def test_whoever_is_let_in_again_probes_those_that_have_begun_to_train_meanwhile() -> None:
    job = at_work(("a", 1), ("b", 1), largest=9, max_restarts=9)
    job.come("c").reaches("c", "a").fails("c", "b")
    job.come("d").reaches("d", "a", "b").join("w3").stop("w1").stop("w2")
    assert (job.roster, job.probed()) == (["w1", "w2", "w3"], {})
    job.work("w1", "w2", "w3").end("w2", agent="b").happen(Disconnected(agent="b"), FRESH_S)
    job.train(TIMEOUT_S)
    assert job.probed() == {"c": ["a", "d"]}
    assert "b" not in job.state.agents
    assert job.reaches("c", "a", "d").heard(messages.Start) == ["c"]


def test_a_generation_that_nobody_forms_twice_counts_against_its_joiners() -> None:
    job = at_work(("a", 2))
    job.come("b").reaches("b", "a").join("w3")
    job.stop("w1").stop("w2")
    assert job.roster == ["w1", "w2", "w3"]
    job.stop("w1").stop("w2").hear("w3", messages.Ready(loop=0, generation=2))
    assert job.roster == ["w1", "w2"]
    assert job.state.agents["b"].probing == ("a",)
    job.work("w1", "w2").reaches("b", "a").stop("w1", acts=7).stop("w2", acts=7)
    assert job.roster == ["w1", "w2", "w3"]
    job.stop("w1", acts=7).stop("w2", acts=7).hear("w3", messages.Ready(loop=0, generation=4))
    assert job.roster == ["w1", "w2"]
    assert [note.fields["generation"] for note in job.notes if note.event == "not formed"] == [2, 4]
    assert [one.worker for one in job.state.excluded] == ["w3"]
    job.end("w3", code=0, agent="b").work("w1", "w2").reaches("b", "a")
    assert not job.state.agents["b"].probing
    assert job.train(5 * TIMEOUT_S).heard(messages.Start) == []
    assert job.happen(ResizeRequested(3)).heard(messages.Start) == ["b"]


def test_a_joiner_is_believed_that_says_which_host_it_did_not_reach() -> None:
    job = at_work(("a", 1))
    job.come("b").reaches("b", "a").join("w2").stop("w1")
    job.stop("w1").hear("w2", sized_by("a"))
    assert job.roster == ["w1"]
    assert job.state.agents["b"].left_out == "host-b does not reach host-a at a:7: timed out"


def test_the_source_stays_though_it_came_last() -> None:
    job = at_work(("a", 2))
    job.stop("w1", acts=5).stop("w2", acts=6)
    assert job.minted.source == 1
    job.stop("w1", acts=5).stop("w2", acts=6)
    job.stop("w1", acts=5).stop("w2", acts=6)
    assert job.roster == ["w2"]


def test_only_generations_in_a_row_count_against_members() -> None:
    job = at_work(("a", 2))
    job.stop("w1").stop("w2")
    for _ in range(3):
        job.stop("w1").stop("w2").work("w1", "w2").stop("w1").stop("w2")
    assert job.roster == ["w1", "w2"]


def test_members_of_which_no_generation_forms_go_one_by_one_the_newest_first() -> None:
    job = at_work(("a", 3))
    job.stop("w1", acts=6).stop("w2", acts=6).stop("w3", acts=6)
    rosters = []
    while len(job.roster) > 1:
        rosters.append(tuple(job.roster))
        for worker in job.roster:
            job.stop(worker, acts=6)
    assert rosters == [("w1", "w2", "w3")] * 2 + [("w1", "w2")] * 2
    assert job.roster == ["w1"]


def test_a_loss_explains_why_a_generation_did_not_form() -> None:
    job = at_work(("a", 3), max_restarts=100)
    for number in range(4, 8):
        job.stop("w1").stop("w2").end(job.roster[-1])
        assert job.state.unformed == 0
        job.work("w1", "w2").ready(f"w{number}", loop=0)
        job.stop("w1").stop("w2")
        assert len(job.roster) == 3
    assert job.state.excluded == ()


def test_a_restart_of_the_coordinator_explains_why_a_generation_did_not_form() -> None:
    job = at_work(("a", 2))
    job.stop("w1").stop("w2")
    for generation in (2, 3, 4):
        job.happen(Restarted()).come("a", 2, running=("w1", "w2")).connect("w1", "w2", generation=generation)
        job.stop("w1").stop("w2")
        assert job.roster == ["w1", "w2"]
    assert job.state.generation == 5
    assert job.state.excluded == ()
