import signal
from pathlib import Path

import pytest

from said import options
from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono.launch.command import ElasticSeat, elastic_command, worker_command
from unisono.launch.elastic.coordinator_process import Listening, server_command
from unisono.launch.elastic.elastic_settings import (
    AgentEnd,
    ElasticSettings,
    Range,
    conclusion_of,
    exits_that_count,
    exits_that_ended_it,
    lines_about,
)
from unisono.launch.failure import Failure, end_of, note_end
from unisono.launch.outcome import JobEnd, Outcome, WorkerExit, open_folder, report, with_faults
from unisono.launch.settings import LaunchSettings, Script
from unisono.membership import server
from unisono.membership.messages import JobOver

pytestmark = pytest.mark.unit

TRAIN = Script("train.py", ("--lr", "0.1"))


@pytest.fixture
def script(tmp_path: Path) -> Script:
    (tmp_path / "train.py").write_text("")
    return Script(str(tmp_path / "train.py"))


# --- how many


@pytest.mark.parametrize(("text", "smallest", "largest"), [("4", 4, 4), ("2:8", 2, 8), (" 3 ", 3, 3), ("0", 0, 0)])
def test_a_number_or_a_range_is_read(text: str, smallest: int, largest: int) -> None:
    assert Range.read(text) == Range(smallest, largest)


@pytest.mark.parametrize("text", ["", "many", "2:", ":8", "2:8:9", "2-8", "1.5", "9999999999", "٣"])
def test_what_is_neither_is_named(text: str) -> None:
    with pytest.raises(JobError, match="--workers .*write a number, such as 4, or a range, such as 2:8"):
        Range.read(text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": Range(0, 4)}, "--workers 0:4: at least 1"),
        ({"workers": Range(4, 2)}, "--workers 4:2: the smaller number comes first"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"failure_timeout_s": 0.0}, "--failure-timeout-s 0"),
        ({"failure_timeout_s": float("nan")}, "--failure-timeout-s nan"),
    ],
)
def test_what_cannot_work_is_named(script: Script, settings: dict[str, object], words: str) -> None:
    wanted = {"workers": Range(1, 2)} | settings
    with pytest.raises(JobError, match=words):
        ElasticSettings(LaunchSettings(script, workers=2), **wanted).check()  # type: ignore[arg-type]


# --- what is started


SEAT = ElasticSeat("w3", 1, "http://127.0.0.1:4711", Path("/runs/a/token"))


def test_a_worker_is_told_who_it_is_and_where_the_coordinator_is_and_what_all_have_in_common() -> None:
    settings = LaunchSettings(TRAIN, workers=4, options=options(shards=8, threads=2))
    common = elastic_command(settings, Path("/runs/a"), None).variables
    assert (common["UNISONO_RUN_DIR"], common["UNISONO_SHARDS"], common["OMP_NUM_THREADS"]) == ("/runs/a", "8", "2")
    assert not {"UNISONO_RANK", "UNISONO_WORLD_SIZE"} & common.keys()
    assert elastic_command(settings, Path("/runs/a"), SEAT).variables == {
        **common,
        "UNISONO_WORKER": "w3",
        "UNISONO_LOCAL_RANK": "1",
        "UNISONO_COORDINATOR": "http://127.0.0.1:4711",
        "UNISONO_TOKEN_FILE": "/runs/a/token",
    }


def test_a_launcher_inside_of_an_elastic_worker_hands_on_nothing_of_it_and_the_other_way_round() -> None:
    elastic = elastic_command(LaunchSettings(TRAIN), Path("/runs/a"), SEAT)
    fixed = worker_command(LaunchSettings(TRAIN), Path("/runs/b"), 0, None)
    inside = fixed.environment(elastic.environment({"HOME": "/h"}))
    assert not {"UNISONO_WORKER", "UNISONO_COORDINATOR", "UNISONO_TOKEN_FILE"} & inside.keys()
    assert not {"UNISONO_RANK", "UNISONO_WORLD_SIZE"} & elastic.environment(inside).keys()
    assert inside["HOME"] == "/h"


def test_the_coordinator_understands_what_it_is_told(tmp_path: Path) -> None:
    launch = LaunchSettings(TRAIN, workers=8)
    settings = ElasticSettings(launch, Range(2, 8), 3, max_restarts=5, restart_on_error=True, failure_timeout_s=7.5)
    module, *words = server_command(settings, tmp_path, Listening(9), fresh=True)
    assert module == server.__name__
    options = server._arguments(words)
    assert (options.run_dir, options.fd, options.fresh, options.restart_on_error) == (tmp_path, 9, True, True)
    assert (options.smallest, options.largest, options.wanted, options.max_restarts) == (2, 8, 3, 5)
    assert options.failure_timeout_s == 7.5
    _, *words = server_command(ElasticSettings(launch, Range(2, 8)), tmp_path, Listening(9), fresh=False)
    later = server._arguments(words)
    assert (later.fresh, later.restart_on_error, later.wanted) == (False, False, None)


# --- how it ends


def exited(worker: str, code: int, time: float = 1.0, **further: float) -> WorkerExit:
    return WorkerExit(worker, code, time, **further)  # type: ignore[arg-type]


def raised(worker: str, time: float) -> WorkerExit:
    failure = Failure(worker, "a", 7, "ValueError", "boom", "ValueError: boom\n", False, time)
    return WorkerExit(worker, 1, time, failure)


def test_an_old_loss_does_not_end_a_job_that_has_survived_it() -> None:
    exits = [exited("w1", -9, 10.0), raised("w2", 20.0), raised("w3", 20.1)]
    assert [each.rank for each in exits_that_ended_it(exits, None)] == ["w2", "w3"]
    told = [exited("w1", -9, 10.0, told_at=9.0), exited("w2", 75, 10.0)]  # whoever was told to end has not ended it
    assert [each.rank for each in exits_that_ended_it(told, None)] == ["w2"]
    outcome = Outcome(
        exits_that_ended_it(exits, None), 3, "a", 1.0, conclusion=conclusion_of(JobOver(reason="it failed"))
    )
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.exit_code) == ("w2", 1)


@pytest.mark.parametrize("host", ["of the error", "of the kill"])
def test_a_kill_that_the_job_had_survived_is_not_blamed_for_an_error_right_after_it(host: str) -> None:
    over = JobOver(reason="w2 on host a: it ended with code 7: ValueError: boom", worker="w2")
    exits = [exited("w1", KILLED, 10.0), *([raised("w2", 10.5)] if host == "of the error" else [])]
    outcome = Outcome(exits_that_ended_it(exits, over), 3, "a", 1.0, conclusion=conclusion_of(over))
    assert outcome.exit_code == 1
    assert "ValueError: boom" in outcome.summary()
    assert "SIGKILL" not in outcome.summary()


@pytest.mark.parametrize(
    ("over", "code", "words"),
    [
        (JobOver(digest="abc"), 0, "workers done"),
        (JobOver(preempted=True, reason="all were asked to leave"), 75, "start it again"),
        (JobOver(reason="w9 on host b: it ended with code 3"), 1, "w9 on host b: it ended with code 3"),
    ],
)
def test_without_a_failure_on_this_host_the_coordinator_has_the_last_word(over: JobOver, code: int, words: str) -> None:
    for interrupted in (None, signal.SIGTERM):
        outcome = Outcome((), 3, "a", 1.0, interrupted, conclusion_of(over))
        assert outcome.exit_code == code
        assert words in outcome.summary()


def test_the_digest_is_known_here_though_the_main_worker_wrote_it_elsewhere(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    JobEnd.of(Outcome((), 3, "a", 1.0, conclusion=conclusion_of(JobOver(digest="abc")), digest="abc")).write(folder)
    result = folder.read_result()
    assert result is not None
    assert (result["weights_sha256"], result["world_size"], result["exit_code"]) == ("abc", 3, 0)


OVER = JobOver(digest="abc", main="w1", finished=("w1", "w2"))
KILLED = -signal.SIGKILL


AT_THE_END: dict[str, tuple[list[WorkerExit], int]] = {
    "another worker is killed": ([exited("w1", 0), exited("w2", KILLED)], 0),
    "the main worker is killed": ([exited("w1", KILLED), exited("w2", 0)], 137),
    "another's last lines fail": ([exited("w1", 0), raised("w2", 1.0)], 1),
    "another's last lines exit": ([exited("w1", 0), exited("w2", 5)], 5),
    "a joiner fails that came too late": ([exited("w1", 0), exited("w2", 0), raised("w3", 1.0)], 0),
    "the main worker is on another host": ([exited("w2", 0), exited("w3", KILLED)], 0),
}


@pytest.mark.parametrize(("exits", "code"), AT_THE_END.values(), ids=AT_THE_END.keys())
def test_after_the_end_errors_count_and_so_does_the_loss_of_the_main_worker(exits: list[WorkerExit], code: int) -> None:
    outcome = Outcome(exits_that_count(exits, OVER), 3, "a", 1.0, conclusion=conclusion_of(OVER), digest=OVER.digest)
    assert outcome.exit_code == code
    assert ("training was complete" in outcome.summary()) == (code != 0)


LOST = None


ELSEWHERE: dict[str, tuple[dict[str, int | None], int]] = {
    "all is well": ({"a1": 0, "a2": 0, "late": 0}, 0),
    "another's last lines fail": ({"a1": 0, "a2": 1}, 1),
    "the main worker's last lines exit, and another's fail": ({"a1": 7, "a2": 1}, 7),
    "the main worker is killed": ({"a1": 137, "a2": 0}, 137),
    "the main worker's agent is lost": ({"a1": LOST, "a2": 0}, 137),
    "another agent is lost": ({"a1": 0, "a2": LOST}, 0),
    "an agent of a joiner that came too late": ({"a1": 0, "a2": 0, "late": 1}, 0),
    "an agent has left before, and the main worker is here": ({"a2": LOST, "left": 75}, 0),
}


@pytest.mark.parametrize(("codes", "code"), ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_after_the_end_scripts_on_other_hosts_count_and_so_does_the_loss_of_the_main_workers(
    codes: dict[str, int | None], code: int
) -> None:
    ends = [AgentEnd(agent, f"host of {agent}", one) for agent, one in codes.items()]
    over = JobOver(digest="abc", main="w1", main_agent="a1", finished=("w1", "w2"), agents=("a1", "a2"))
    outcome = Outcome((), 3, "a", 1.0, conclusion=conclusion_of(over, ends), digest=over.digest)
    assert outcome.exit_code == code
    assert ("training was complete by then: weights sha256 abc" in outcome.summary()) == (code != 0)
    assert (outcome.error is None) == (code == 0)
    told = ["an agent on host of a2 was killed or lost (training was complete by then, and it is not missed)"]
    assert lines_about(over, ends) == (told if codes["a2"] is LOST else [])


@pytest.mark.parametrize(("codes", "code"), [([1, 7, 0], 7), ([75, LOST, 1], 1), ([], 1)])
def test_a_job_that_has_failed_ends_with_the_exit_code_of_the_script_that_failed_elsewhere(
    codes: list[int | None], code: int
) -> None:
    ends = [AgentEnd(f"a{number}", "host b", one) for number, one in enumerate(codes)]
    assert conclusion_of(JobOver(reason="w2 failed", worker="w2"), ends).exit_code == code


def test_exit_code_result_and_words_say_the_same_of_a_main_worker_that_was_killed_after_the_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_result({"weights_sha256": "abc", "steps": 9, "exit_code": 0, "error": None})
    folder.journal("fault", number=7, kind="kill", step=8, rank=0, pid=4711)
    killed = exited("w1", KILLED, pid=4711)
    exits = with_faults(exits_that_count([killed], OVER), folder)
    outcome = Outcome(exits, 3, "a", 1.0, conclusion=conclusion_of(OVER), digest=OVER.digest)
    words = "worker w1 on host a was killed by SIGKILL: injected fault 7 (kill), at step 8; training was complete"
    JobEnd.of(outcome).write(folder)
    result = folder.read_result()
    assert result is not None
    assert (result["weights_sha256"], result["steps"], result["exit_code"]) == ("abc", 9, 137)
    assert result["error"]["message"] == outcome.summary()
    assert outcome.summary().startswith(words)
    assert outcome.summary() in report(outcome, folder)
    assert "memory" not in report(outcome, folder)


def test_only_a_fault_that_kills_explains_a_kill(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.journal("fault", number=1, kind="slow", step=8, rank=0, pid=4711)
    folder.journal("fault", number=2, kind="kill", step=8, rank=0, pid=4712)
    exits = [exited("w1", KILLED, pid=4711), exited("w2", KILLED, pid=4712), exited("w3", 1, pid=4712)]
    assert [each.fault.partition(",")[0] for each in with_faults(exits, folder)] == ["", "injected fault 2 (kill)", ""]


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_process_that_is_killed_when_its_script_has_ended_has_the_scripts_exit_code(
    code: int, tmp_path: Path
) -> None:
    folder = open_folder(tmp_path / "run", "train")
    assert end_of(folder, "w1", KILLED)[0] == KILLED
    note_end(folder, "w1", code)
    assert (end_of(folder, "w1", KILLED)[0], end_of(folder, "w1", 9)[0]) == (code, 9)
    assert end_of(open_folder(tmp_path / "run", "train"), "w1", KILLED)[0] == KILLED  # of an earlier start
