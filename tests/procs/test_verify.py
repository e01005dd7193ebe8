"""`unisono verify` on small scripts: one that keeps the promise, and one for each way to break it."""

import os
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from commands import completed

pytestmark = [pytest.mark.procs, pytest.mark.usefixtures("warm")]

SANE = """
    import os, sys
    import torch, unisono
    from torch import nn

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 96

        def __getitem__(self, index):
            return torch.randn(8), index % 2

    def build():
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = unisono.init(batch_size=48, shards=3)
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(Data(), epochs=2):
        step.run(loss_fn)
    run.finish(model)
"""


@dataclass(frozen=True)
class Verified:
    """What the command printed, with the words in one line as they were before a terminal's wrapping."""

    code: int
    output: str
    progress: str

    @property
    def words(self) -> str:
        return " ".join(self.output.split())


def verify(folder: Path, options: str, *changes: tuple[str, str], args: str = "") -> Verified:
    """Verify the sane script after changes to it."""
    text = dedent(SANE).lstrip()
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    words = ("verify", *options.split(), "train.py", *args.split())
    done = completed(*words, cwd=folder, env={**os.environ, "COLUMNS": "100"}, timeout=90)
    assert "Traceback" not in done.stderr, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]  # runs go elsewhere
    return Verified(done.returncode, done.stdout, done.stderr)


def test_a_sane_script_is_identical_on_one_worker_and_on_three(tmp_path: Path) -> None:
    done = verify(tmp_path, "", args="--workers 1,3 --steps 2")

    assert done.code == 0, done.output
    assert "Identical: all 9 parameters and buffers" in done.words
    assert "with 1 and 3 workers, after each of 2 steps" in done.words
    rows = [line.split() for line in done.output.splitlines() if line.split()[:1] in (["1"], ["3"])]
    assert rows[0][2] == rows[1][2]
    assert rows[1][3] == "identical"
    assert "nothing was trained" not in done.words
    assert done.progress.splitlines() == ["run 1 of 2: 1 worker", "run 2 of 2: 3 workers"]


@pytest.mark.slow
def test_a_loss_that_depends_on_the_rank_is_found_with_step_shard_and_line(tmp_path: Path) -> None:
    done = verify(tmp_path, "--workers 1,2 --steps 2", ("batch[1])", "batch[1]) * (1 + run.rank)"))

    assert done.code == 1
    assert "Not identical: 2 workers part from 1 worker in step 0" in done.words
    assert "step 0: the loss of shard 2 is" in done.words
    assert "others after step 0" in done.words
    assert "1 worker a second time: the same bits" in done.words
    assert "the loss depends on the rank: only shards of rank 1 differ" in done.words
    assert "train.py:16 return nn.functional.cross_entropy" in done.words


def test_weights_changed_on_the_main_worker_only_are_found_although_the_script_fails_of_it(tmp_path: Path) -> None:
    after = "step.run(loss_fn)\n    if run.is_main:\n        model[0].bias.data.add_(1)"
    done = verify(tmp_path, "--workers 2,1 --steps 1", ("step.run(loss_fn)", after))

    assert done.code == 1
    assert "with 2 workers, rank 1 parts from rank 0 in step 0" in done.words
    assert "at the end of the loop's body: 0.bias" in done.words
    assert "code after step.run changed the weights on some workers only" in done.words
    assert "train.py:24 if run.is_main:" in done.words
    assert "failed with exit code 1" in done.words
    assert "JobMismatch" in done.words


@pytest.mark.slow
def test_a_script_that_fails_ends_verify_with_its_code_and_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, kept = tmp_path / "here", tmp_path / "kept"
    here.mkdir()
    kept.mkdir()
    monkeypatch.setenv("TMPDIR", str(kept))
    change = ("model = build()", 'print("so far", sys.argv)\nsys.exit(7)')
    done = verify(here, "--workers 1,2 --keep", change, args="--x")

    assert done.code == 7
    assert "[rank 0] so far ['train.py', '--x']" in done.output
    assert "The run with 1 worker failed with exit code 7" in done.words
    assert "run 2" not in done.progress
    (folder,) = kept.glob("unisono-verify-*")
    assert f"runs, logs and traces are kept in {folder}" in done.output
    assert (folder / "run-1-1-worker" / "run" / "logs" / "rank-0.log").exists()


def test_more_workers_than_shards_show_the_scripts_own_error(tmp_path: Path) -> None:
    done = verify(tmp_path, "--workers 2,1", ("shards=3", "shards=1"))

    assert done.code == 2
    assert "set shards=2" in done.words


def test_a_script_that_never_calls_unisono_is_told_so(tmp_path: Path) -> None:
    done = verify(tmp_path, "--workers 1,2", ("import os, sys\n", "raise SystemExit\n"))

    assert done.code == 2
    assert "train.py ended without ever calling unisono.init" in done.progress
