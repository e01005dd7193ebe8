"""All loggers in real processes, which are killed: each step once in each of them."""

from pathlib import Path

import pytest

from logged import READERS, require_same
from training import Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.slow]


def test_whatever_is_killed_every_logger_has_each_step_once(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    """The main worker is killed, then everything; then two workers go on where three were."""
    options = ("--max-restarts", "1", "--checkpoint-every", "4", "--log-to", ",".join(READERS))
    fault = {"rank": 0, "step": 7, "place": "between"}
    started.append(
        Training(tmp_path / "run", "-n", "3", *options, faults=[fault], PACE_S="0.03", UNISONO_LOG_EVERY_S="0.05")
    )
    started[0].until_step(13)
    started[0].kill_everything()
    started.append(Training(tmp_path / "run", "-n", "2", *options, PACE_S="0", UNISONO_LOG_EVERY_S="0.05"))
    assert started[1].end() == serial.end()
    assert started[1].journal("lost")
    for logger in READERS:
        require_same(tmp_path / "run", logger)
    assert "logs no more" not in started[0].output.read_text() + started[1].output.read_text()
