"""Shells complete commands, options, and the names of policies, strategies, loggers and run folders."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.procs

PATIENCE_S = 60
COMMAND = Path(sys.executable).with_name("unisono")


def completed(line: str, cwd: Path, shell: str) -> list[str]:
    """What a shell offers for the last word of a line."""
    asked = {
        "bash": {"_UNISONO_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)},
        "zsh": {"_UNISONO_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line},
        "fish": {
            "_UNISONO_COMPLETE": "complete_fish",
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    }[shell]
    done = subprocess.run(
        [COMMAND], cwd=cwd, env={**os.environ, **asked}, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("unisono re", {"resize", "replace", "replay"}),
        ("unisono run --fail", {"--failure-timeout-s"}),
        ("unisono run --policy noise", {"noise-scale"}),
        ("unisono run --strategy pa", {"parameter-server", "pair-averaging"}),
        ("unisono run --log-to te", {"tensorboard"}),
        ("unisono status --run-dir runs/tr", {"runs/train-1"}),
        ("unisono replay runs/", {"runs/train-1"}),
        ("unisono verify train.py --steps", {"--steps"}),
    ],
)
def test_a_name_is_completed(line: str, names: set[str], tmp_path: Path) -> None:
    for name in ("train-1", "no-run"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "train-1" / "job.json").write_text("{}")

    assert set(completed(line, tmp_path, "bash")) == names


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_told_the_names(shell: str, tmp_path: Path) -> None:
    assert "local-sgd" in " ".join(completed("unisono run --strategy loc", tmp_path, shell))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_a_shell(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = f"{COMMAND} --install-completion; exit 0"  # a shell with one command alone would become that command
    done = subprocess.run(
        [shell, "-c", script],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert f"{shell} completion installed in" in done.stdout, done.stderr
    assert any("_UNISONO_COMPLETE" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())
