"""A cloud takes machines away while a script trains: workers leave in time, and the weights are the serial run's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forks.commands import start
from metadata_service import Metadata, metadata_service
from training import PATIENCE_S, SCRIPT, Trained, Training, control_of

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Metadata]:
    """That of a cloud."""
    with metadata_service(request.param) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("service", ["aws"], indirect=True)
@pytest.mark.parametrize("workers", ["2", "1:2"])
def test_a_job_whose_first_host_is_taken_away_leaves_a_checkpoint_and_goes_on_elsewhere(
    workers: str, service: Metadata, serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    options = ("-n", workers, "--notices", "auto")
    started.append(Training(tmp_path / "run", *options, PACE_S="0.03", **service.variables))
    started[0].until_step(3)
    service.take_away()
    assert started[0].process.wait(PATIENCE_S) == 75, started[0].output.read_text()
    (noted,) = started[0].journal("notice")
    assert noted["words"] == "AWS takes this machine away (terminate) at '2026-11-24T14:22:00Z'"
    assert started[0].journal("preempted")
    started.append(Training(tmp_path / "run", "-n", "2", PACE_S="0"))
    assert started[1].end() == serial.end()
    assert started[1].steps == serial.steps


BAD = {
    "garbage": b"\x00\xff" * 5000,
    "another address": b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n",
    "far too much": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 2**24,
}


@pytest.mark.slow
@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_a_metadata_service_that_answers_nothing_sensible_stops_nobody_and_is_told_of_once(
    service: Metadata, serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    """It also hangs. What it says again when it has come to itself is heard."""
    started.append(Training(tmp_path / "run", "-n", "2", "--notices", "aws", PACE_S="1.5", **service.variables))
    training = started[0]

    def until_asked(times: int) -> None:
        wanted = len(service.asked) + times
        training.until_so(lambda: len(service.asked) >= wanted, "more questions")

    until_asked(3)  # one for a token, two with it
    for raw in BAD.values():
        service.raw = raw
        until_asked(1)
    service.hang(True)
    until_asked(2)  # the second, when nobody waits for the first answer any more
    service.raw = None
    service.hang(False)
    training.until_so(lambda: "can be read again" in training.output.read_text(), "a service that answers")
    assert training.process.poll() is None
    training.hurry()
    assert training.end() == serial.end()
    assert training.steps == serial.steps
    said = training.output.read_text()
    (told,) = [line for line in said.splitlines() if "notices from aws cannot be read" in line]
    assert "training goes on" in told
    assert said.count("notices from aws can be read again") == 1
    assert not training.journal("notice")
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("service", ["azure"], indirect=True)
def test_a_host_that_is_taken_away_leaves_and_the_others_go_on(
    service: Metadata, serial: Trained, started: list[Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.append(Training(tmp_path / "run", "-n", "1:2", "--here", "1", PACE_S="0.05"))
    training = started[0]
    training.until("minted", generation=1)
    for name, value in {**service.variables, "PACE_S": "0.05"}.items():
        monkeypatch.setenv(name, value)
    words = ("join", "-n", "1", "--notices", "azure", "--run-dir", str(training.run_dir), str(SCRIPT))
    with (tmp_path / "join.txt").open("wb") as output:
        host = start(*words, stdout=output, stderr=output)
    training.until_so(lambda: len(control_of(training.run_dir).status()["members"]) == 2, "two workers")
    service.take_away()
    training.until("left")
    assert host.wait(PATIENCE_S) in (0, 75), (tmp_path / "join.txt").read_text()
    training.hurry()
    assert training.end() == serial.end()
    (asked,) = training.journal("agent asked to leave")
    assert asked["notice"].startswith("Azure takes this machine away (Preempt at ")
    assert training.steps == serial.steps
    assert service.approved
