"""What a job on Ray ends with when its agents end after the coordinator."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.checkpoint.folder import RunFolder
from unisono.launch.elastic.address import HostOrder
from unisono.launch.elastic.elastic_settings import AgentEnd, ElasticSettings, Range
from unisono.launch.ray_request import RayRequest
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal import Terminal

pytestmark = pytest.mark.unit

LOST = None


def after_the_coordinator(*words: Any) -> Any:
    """What a job on Ray ends with."""
    from unisono.launch import ray_actors  # loads Ray, which takes seconds

    return ray_actors.after_the_coordinator(*words)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """That of a job whose training is complete, on the agents a1, which has the main worker, and a2."""
    folder = RunFolder(tmp_path)
    folder.journal(
        "over", outcome="failed", reason="w1 failed", digest="", main_agent="", agents=[]
    )  # an earlier start
    folder.journal("over", outcome="done", reason="", digest="abc", main_agent="a1", agents=["a1", "a2"])
    folder.write_result({"weights_sha256": "abc", "steps": 9, "world_size": 2, "exit_code": 0, "error": None})
    return folder


def ends(**codes: int | None) -> list[AgentEnd]:
    return [AgentEnd(agent, f"node {agent}", code) for agent, code in codes.items()]


@pytest.mark.parametrize(
    ("agents", "code", "words"),
    [
        (ends(a1=0, a2=0), 0, ""),
        (ends(a1=0, a2=1), 1, "a script on node a2 has failed after run.finish (exit code 1)"),
        (ends(a1=LOST, a2=1), 137, "the main worker was killed or lost on node a1 with its agent, after run.finish"),
        (ends(a0=LOST, a1=0, a2=LOST), 0, ""),
    ],
)
def test_exit_code_words_and_result_of_a_job_on_ray_agree_about_the_lines_after_finish(
    folder: RunFolder, agents: list[AgentEnd], code: int, words: str
) -> None:
    shown = StringIO()
    found, why = after_the_coordinator(folder.path, 0, "", agents, Terminal(shown, shown))
    result = folder.read_result()
    assert result is not None
    assert (found, result["exit_code"], result["steps"], result["weights_sha256"]) == (code, code, 9, "abc")
    assert why.startswith(words)
    assert ("training was complete by then: weights sha256 abc" in why) == (code != 0)
    assert result["error"] == ({"message": why} if code else None)
    assert ("an agent on node a2 was killed or lost" in shown.getvalue()) == (agents[-1].code is LOST)
    assert "a0" not in shown.getvalue(), "it was replaced while the job trained"


@pytest.mark.parametrize(("code", "why"), [(75, ""), (1, "no agent is left")])
def test_a_job_that_the_coordinator_has_not_ended_well_ends_as_it_says(folder: RunFolder, code: int, why: str) -> None:
    assert after_the_coordinator(folder.path, code, why, ends(a1=5), Terminal.of_this_process()) == (code, why)


def test_without_a_journal_the_coordinators_exit_code_stands(tmp_path: Path) -> None:
    assert after_the_coordinator(tmp_path, 0, "", ends(a1=5), Terminal.of_this_process()) == (0, "")


class Bundles:
    """Five of them, each on a node of its own; the end of its agent is asked for by its number."""

    def __len__(self) -> int:
        return 5

    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(5)]

    def actor(self, number: int, *_: object) -> SimpleNamespace:
        return SimpleNamespace(run=SimpleNamespace(remote=lambda access, agent: number))


@pytest.mark.parametrize("are_noticed", [True, False], ids=["before the coordinator's end", "after it"])
def test_the_end_of_each_agent_is_noted_and_whoever_was_killed_or_does_not_end_is_lost(
    monkeypatch: pytest.MonkeyPatch, *, are_noticed: bool
) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it itself
    agents = pytest.importorskip("unisono.launch.ray_actors", reason="ray is not installed")
    from ray.exceptions import GetTimeoutError, RayActorError

    found: list[Any] = [None] * 5

    def wait(places: list[int], timeout: float, num_returns: int = 1) -> tuple[list[int], list[int]]:
        return [one for one in places if found[one] is not None], [one for one in places if found[one] is None]

    def get(place: int, timeout: float = 0) -> Any:
        if found[place] is None or isinstance(found[place], Exception):
            raise found[place] or GetTimeoutError
        return found[place]

    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr("ray.put", id)
    settings = ElasticSettings(LaunchSettings(Script(__file__)), Range(1, 5))
    request = RayRequest.of_this_process(settings, None, {})
    job = agents.Agents(request, HostOrder("", False, "", "", "", "", ()), Bundles(), print, frozenset)
    job.look()
    found[:] = [0, 1, 137, RayActorError(), None]
    if are_noticed:
        job.look()
        found[2:4] = None, None  # others were started
    job.until_ended(1.0)
    first = {each.where: each.code for each in reversed(job.ends)}
    assert first == {"node n0": 0, "node n1": 1, "node n2": LOST, "node n3": LOST, "node n4": LOST}
