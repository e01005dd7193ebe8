import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest

from unisono.launch.failure import Failure
from unisono.launch.outcome import Blame, JobConclusion, Outcome, WorkerExit, describe, find_cause

pytestmark = pytest.mark.unit


def failure(rank: int, time: float, *, consequence: bool = False, message: str = "boom") -> Failure:
    kind = "unisono.errors.WorkerLost" if consequence else "ValueError"
    return Failure(rank, "a", 100 + rank, kind, message, f"Traceback …\n{kind}: {message}\n", consequence, time)


def raised(rank: int, time: float, *, consequence: bool = False, told_at: float | None = None) -> WorkerExit:
    return WorkerExit(rank, 1, time + 0.1, failure(rank, time, consequence=consequence), told_at)


def outcome(exits: Sequence[WorkerExit], interrupted: int | None = None) -> Outcome:
    return Outcome(tuple(exits), len(exits), "a", 12.3, interrupted)


def test_the_cause_goes_before_its_consequences_even_if_they_end_earlier() -> None:
    exits = [raised(0, 1.0, consequence=True), raised(1, 1.5), raised(2, 1.1, consequence=True)]
    found = find_cause(exits)
    assert found is not None
    assert found.rank == 1


def test_of_two_causes_the_earlier_exception_counts_not_the_earlier_exit() -> None:
    slow_to_end = WorkerExit(0, 1, 9.0, failure(0, time=1.0))
    assert find_cause([slow_to_end, raised(1, 2.0)]) is slow_to_end


def test_a_death_by_signal_is_a_cause() -> None:
    killed = WorkerExit(1, -signal.SIGKILL, 2.0)
    result = outcome([raised(0, 2.1, consequence=True), killed])
    assert result.cause is killed
    assert result.exit_code == 137
    assert "rank 1 on host a was killed by SIGKILL: likely the memory ran out" in result.summary()
    assert result.error is not None
    assert (result.error["rank"], result.error["type"]) == (1, "SIGKILL")


def test_who_was_told_to_end_is_not_to_blame_however_it_ends() -> None:
    told = [
        WorkerExit(0, -signal.SIGTERM, 3.0, told_at=2.0),
        WorkerExit(2, 1, 3.0, failure(2, time=2.5), told_at=2.0),
    ]
    own = WorkerExit(1, 5, 4.0)
    assert [each.blame() for each in told] == [Blame.ENDED_BY_LAUNCHER] * 2
    assert find_cause([*told, own]) is own


def test_a_worker_that_is_ended_on_its_way_out_has_the_code_of_its_own_error() -> None:
    own = replace(failure(1, time=1.0), exit_code=2)
    ended = WorkerExit(1, -signal.SIGTERM, 1.4, own, told_at=1.3)
    assert outcome([WorkerExit(0, 2, 1.2, replace(failure(0, time=1.1), exit_code=2)), ended]).exit_code == 2
    assert WorkerExit(1, -signal.SIGTERM, 1.4, own, told_at=0.9).shell_code == 143
    assert "boom" in describe(ended, "h")
    assert "SIGTERM" not in describe(ended, "h")


def test_a_job_that_was_interrupted_before_it_trained_says_nothing_of_a_checkpoint_that_it_left() -> None:
    for exits in ([], [WorkerExit("w1", -signal.SIGTERM, 1.0, told_at=0.9)]):
        result = replace(outcome(exits, signal.SIGINT), conclusion=JobConclusion(75, "all were asked to leave"))
        assert result.exit_code == 75
        assert result.summary().startswith("no worker had begun to train here: start it again")


def test_one_that_left_alone_makes_the_others_fail_and_the_report_says_so() -> None:
    result = outcome([WorkerExit(0, 0, 1.0), raised(1, 1.5, consequence=True)])
    assert result.exit_code == 1
    assert "no error came from the worker that was missed: rank 0 left with exit code 0, and its" in result.summary()


def test_a_worker_whose_script_had_ended_is_not_said_to_be_ended_by_the_launcher() -> None:
    lost = raised(0, 1.5, consequence=True)
    had_ended = outcome([lost, WorkerExit(1, 0, 1.0, told_at=1.6)])
    assert "rank 1 left with exit code 0, and its script had ended without run.finish, which every" in had_ended.note
    elastic = replace(had_ended, exits=tuple(replace(end, rank=f"w{end.rank}") for end in had_ended.exits))
    assert "worker w1 left with exit code 0)" in elastic.note  # it may have been asked to
    assert "rank 1 was ended by the launcher" in outcome([lost, WorkerExit(1, -15, 2.0, told_at=1.6)]).note


@pytest.mark.parametrize(
    ("exits", "interrupted", "code", "words"),
    [
        ([WorkerExit(0, 0, 1.0), WorkerExit(1, 0, 2.0)], None, 0, "2 workers done in 12.3 s"),
        ([WorkerExit(0, 0, 1.0), WorkerExit(1, 1, 1.0)], None, 1, "rank 1 on host a ended with exit code 1"),
        ([WorkerExit(0, 0, 1.0), WorkerExit(1, 124, 1.0)], None, 124, "rank 1 on host a ended with exit code 124"),
        ([WorkerExit(0, -63, 1.0)], None, 191, "killed by signal 63"),
        ([WorkerExit(0, 75, 1.0), WorkerExit(1, 75, 1.0)], signal.SIGTERM, 75, "left with a checkpoint: start it agai"),
        ([WorkerExit(0, 0, 1.0), WorkerExit(1, 75, 1.0)], None, 75, ""),
        ([WorkerExit(0, 143, 1.0), raised(1, 1.1)], signal.SIGTERM, 1, "rank 1"),
        ([WorkerExit(0, -signal.SIGTERM, 1.0), WorkerExit(1, 0, 1.0)], None, 143, ""),
        ([WorkerExit(0, -signal.SIGKILL, 9.0, told_at=8.9), WorkerExit(1, 75, 2.0)], signal.SIGTERM, 143, ""),
        ([], signal.SIGINT, 130, ""),
    ],
)
def test_the_code_of_a_job_is_that_of_its_cause(
    exits: list[WorkerExit], interrupted: int | None, code: int, words: str
) -> None:
    result = outcome(exits, interrupted)
    assert result.exit_code == code
    assert words in result.summary()
    assert (result.cause is None) == (code in (0, 75, 130))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_has_the_code_of_the_signal(number: int, code: int) -> None:
    exits = [WorkerExit(0, -number, 1.0), WorkerExit(1, code, 1.0), raised(2, 1.0, consequence=True)]
    result = outcome(exits, interrupted=number)
    assert result.exit_code == code
    assert result.error == {"message": f"ended by {signal.Signals(number).name}"}
    assert outcome(exits[:1], interrupted=number).error == result.error


def test_jobs_that_fail_in_the_same_way_have_the_same_reason_whoever_failed() -> None:
    first, second = (outcome([WorkerExit(0, 0, 1.0), WorkerExit(rank, 1, 2.0, failure(rank, 1.5))]) for rank in (1, 2))
    assert first.reason == second.reason == "ValueError: boom"
    killed = [outcome([WorkerExit(rank, -signal.SIGKILL, 1.0)]).reason for rank in (0, 1)]
    assert killed == ["SIGKILL", "SIGKILL"]
    assert outcome([WorkerExit(0, 3, 1.0)]).reason == "exit code 3"
