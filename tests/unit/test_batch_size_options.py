"""The options of ``unisono batch-size``, and what it prints."""

from pathlib import Path
from typing import Any

import pytest

from unisono.errors import JobError
from unisono_lab.commands.batch_size import LEAST_STEPS, answer, batch_size, file_of, read_mib
from unisono_lab.study.results import BatchCurve, Tried

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "mib"), [("2GiB", 2048), ("500 MiB", 500), ("1.5GB", 1.5e9 / 2**20), ("1048576", 1), ("2gib", 2048)]
)
def test_sizes_are_read_with_their_units(text: str, mib: float) -> None:
    assert read_mib(text) == pytest.approx(mib, abs=1e-3)


@pytest.mark.parametrize("text", ["", "much", "-2GiB", "0", "2 kilograms"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--memory-limit .*: needs a size, such as 2GiB"):
        read_mib(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 2}, f"--steps 2: a trial needs at least {LEAST_STEPS}"),
        ({"margin": 2.0}, "--margin 2"),
        ({"script": "nowhere.py"}, "there is no script nowhere.py"),
        ({"shards": 1, "workers": 2}, "--workers 2 with --shards 1"),
    ],
)
def test_nothing_is_started_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        batch_size(**{"script": __file__, "launch__tuning": False, **options})


def test_a_file_that_cannot_be_written_is_said_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="name another file with --json"):
        file_of(tmp_path / "file" / "batch-size.json", "train")


def said(*trials: Tried, workers: int = 1, **found: Any) -> str:
    rows = tuple(sorted(trials, key=lambda one: one.batch))
    curve = BatchCurve(rows=rows, **found, workers=workers, memory_limit_mib=500.0, margin=0.1)
    return "\n".join(answer(curve))


def test_the_answer_names_the_batch_to_write_into_the_script() -> None:
    trials = Tried(64, True, 1234.0), Tried(90, True, 1200.0), Tried(100, True)
    text = said(*trials, workers=2, largest=100, with_margin=90, best=64)
    assert (
        "largest batch that fits: 100 per worker, 200 in all; larger batches do not fit into memory (limit: 500 MiB"
        in text
    )
    assert "with a margin of 10\u00a0%: 90 per worker, 180 in all" in text
    assert "best throughput: 64 per worker, 128 in all, 1234 samples/s" in text
    assert "unisono.init(batch_size=128) with 2 workers" in text


def test_without_a_batch_that_fits_the_answer_says_why() -> None:
    text = said(Tried(2, False, words="too much"), Tried(1, False, words="much too much"))
    assert text == "no batch fits, not even 1 (limit: 500 MiB of the host's memory): much too much"
