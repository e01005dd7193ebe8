"""The search for the largest batch, with a real script: each lack of memory is an answer, and leaves nothing behind."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands import completed

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm")]

SCRIPT = Path(__file__).parent / "scripts" / "hungry.py"
PATIENCE_S = 200.0


@dataclass(frozen=True)
class Ended:
    """How a search ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def curve(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "batch-size.json").read_text())
        return found

    @property
    def fits(self) -> dict[int, bool]:
        return {row["batch"]: row["fits"] for row in self.curve["rows"]}


def search(folder: Path, *words: object) -> Ended:
    command = ("batch-size", SCRIPT, "--json", "batch-size.json", "--steps", 3, *words)
    done = completed(*command, cwd=folder, timeout=PATIENCE_S)
    assert "Traceback" not in done.stdout + done.stderr
    assert not (folder / "own").exists()
    return Ended(done.returncode, done.stdout, done.stderr, folder)


@pytest.mark.slow
def test_under_a_memory_limit_the_largest_batch_is_within_5_percent_of_one_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, limit = 2, 330
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # without holes in its heap a larger batch always needs more
    ended = search(tmp_path, "-n", workers, "--memory-limit", f"{limit}MiB", "--from", 512)
    assert ended.code == 0, ended.err
    curve = ended.curve
    assert ended.fits[curve["largest"]]
    assert min(batch for batch, fits in ended.fits.items() if not fits) <= 1.05 * curve["largest"]
    for row in curve["rows"]:
        assert (row["peak_mib"] <= limit) == row["fits"], row
        assert (row["samples_per_s"] is None) == (not row["fits"])
    assert 0.85 * curve["largest"] <= curve["with_margin"] <= 0.9 * curve["largest"]
    assert curve["best"] <= curve["with_margin"]
    assert (curve["workers"], curve["memory_limit_mib"], curve["margin"]) == (workers, limit, 0.1)
    assert f"recommended: unisono.init(batch_size={curve['best'] * workers})" in ended.out
    assert re.search(r"does not fit: rank \d on host .* needed 3\d\d MiB, more than its limit of 330", ended.err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "words"),
    [
        pytest.param("--raises-above", "RuntimeError: .*can't allocate memory", marks=pytest.mark.slow),
        ("--killed-above", "SIGKILL"),
    ],
)
def test_a_lack_of_memory_on_one_worker_is_an_answer_for_all(option: str, words: str, tmp_path: Path) -> None:
    ended = search(tmp_path, "-n", 2, "--from", 64, "--memory-limit", "8GiB", "--", option, 100)
    assert ended.code == 0, ended.err
    assert ended.curve["largest"] in (98, 99, 100)
    assert all(fits == (batch <= 100) for batch, fits in ended.fits.items())
    assert re.search(f"batch 128: does not fit: rank . on host .*{words}", ended.err)


@pytest.mark.slow
def test_a_script_that_fails_for_another_reason_ends_the_search_and_its_log_stays(tmp_path: Path) -> None:
    ended = search(tmp_path, "--from", 64, "--", "--breaks-above", 40)
    assert ended.code == 1
    assert "with a batch of 128 the script fails for another reason than its memory" in ended.err
    assert "ValueError: 64 samples in a shard are too many" in ended.err
    log = re.search(r"\(log: (.*)\)", ended.err)
    assert log is not None
    assert tmp_path / log[1] == tmp_path / "batch-size.failed" / "logs" / "rank-0.log"
    assert "ValueError" in (tmp_path / log[1]).read_text()


@pytest.mark.slow
def test_a_limit_under_which_nothing_fits_is_said(tmp_path: Path) -> None:
    ended = search(tmp_path, "--from", 4, "--memory-limit", "20MiB", "--", "--shards", 1)
    assert "no batch fits, not even" in ended.out, ended.err
    assert ended.code == 1
    assert ended.curve["largest"] is None
