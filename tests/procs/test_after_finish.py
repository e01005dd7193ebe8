"""What the script does after `run.finish`, and who is missed there."""

import json
from pathlib import Path
from typing import Any

import pytest

from outcomes import train

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120), pytest.mark.usefixtures("warm")]

SCRIPT = Path(__file__).parent / "scripts" / "after_finish.py"
ELASTIC, FIXED = ("-n", "2", "--max-restarts", "1"), ("-n", "2")


def ended(folder: Path, options: tuple[str, ...], victim: int, how: str) -> tuple[int, str, dict[str, Any]]:
    done = train(folder, *options, script=SCRIPT, arguments=(str(victim), how))
    return done.returncode, done.stdout + done.stderr, json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    ("options", "victim", "how", "code"),
    [
        pytest.param(ELASTIC, 1, "kill", 0, marks=pytest.mark.slow),
        pytest.param(ELASTIC, 0, "kill", 137, marks=pytest.mark.slow),
        pytest.param(ELASTIC, 1, "raise", 1, marks=pytest.mark.slow),
        pytest.param(FIXED, 1, "kill", 137, marks=pytest.mark.slow),
        (FIXED, 0, "raise", 1),
    ],
)
def test_exit_code_result_and_words_agree_about_the_lines_after_finish(
    options: tuple[str, ...], victim: int, how: str, code: int, tmp_path: Path
) -> None:
    found, said, result = ended(tmp_path / "run", options, victim, how)
    assert (found, result["exit_code"]) == (code, code), said
    assert len(result["weights_sha256"]) == 64
    complete = f"training was complete by then: weights sha256 {result['weights_sha256']}"
    assert (complete in said) == (code != 0)
    assert (result["error"] is None) == (code == 0)
    if code:
        assert complete in result["error"]["message"]
    else:
        assert "was killed by SIGKILL" in said
        assert "and it is not missed" in said
        assert (tmp_path / "run" / "exported-0").exists()


def test_started_again_a_job_whose_last_lines_were_cut_short_only_runs_those(tmp_path: Path) -> None:
    options = (*ELASTIC, "--checkpoint-every", "2")
    assert ended(tmp_path / "run", options, 0, "kill")[0] == 137
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    code, said, result = ended(tmp_path / "run", options, -1, "kill")
    assert (code, result["exit_code"], result["steps"]) == (0, 0, 4), said
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert (tmp_path / "run" / "exported-0").exists()


@pytest.mark.parametrize("options", [ELASTIC, FIXED])
def test_a_job_whose_result_cannot_be_written_does_not_end_as_if_it_were(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    done = train(tmp_path / "run", *options, script=SCRIPT, arguments=("0", "obstruct"))
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "unisono: training was complete by then" in said
    assert f"{tmp_path / 'run' / 'result.json'} could not be written: [Errno 21] Is a directory" in said
    assert (tmp_path / "run" / "exported-0").exists()


@pytest.mark.parametrize("options", [ELASTIC, FIXED])
def test_a_result_for_which_there_is_room_in_the_end_is_whole(options: tuple[str, ...], tmp_path: Path) -> None:
    code, said, result = ended(tmp_path / "run", options, 0, "room at last")
    assert (code, result["exit_code"], result["error"]) == (0, 0, None), said
    assert (result["steps"], result["samples"], result["world_size"]) == (4, 32, 2)
    assert f"weights sha256 {result['weights_sha256']}" in said


def test_a_result_that_lacks_what_the_main_worker_knows_is_that_of_no_job_that_ended_well(tmp_path: Path) -> None:
    code, said, result = ended(tmp_path / "run", ("-n", "1:2"), 0, "room too late")
    assert (code, result["exit_code"], result["steps"], result["world_size"]) == (1, 1, None, 2), said
    assert f"weights sha256 {result['weights_sha256']}; but the main worker could not write" in said
