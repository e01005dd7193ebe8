"""The worked example of the guide: from a real study to the command of a job."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]


def printed() -> list[str]:
    """The commands of the section."""
    page = (ROOT / "docs" / "guide" / "simulate.md").read_text()
    section = page.split("## From a study to a decision")[1].split("\n## ")[0]
    return [line.strip() for line in section.splitlines() if line.startswith(("    python ", "    unisono "))]


def done(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", command],  # noqa: S607 (a person's shell)
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    return ran.stdout


def test_the_worked_example_goes_from_a_study_to_a_command_as_it_is_printed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    trace, study, forecast = printed()
    done(trace, tmp_path)
    made = tmp_path / "examples" / "simulation" / "generated-trace.csv"
    assert made.read_bytes() == (ROOT / "examples" / "simulation" / "generated-trace.csv").read_bytes()
    done(study, tmp_path)
    found = json.loads(done(f"{forecast} --json", tmp_path))
    assert found["measured_to"] == 2
    assert found["extrapolation"] is True
    assert found["figures"]["a_c"]["source"] == "fitted"
    assert found["margins"]
    best = found["candidates"][0]
    assert best["commands"][0]["command"].startswith("unisono run -n 1:")
    assert (tmp_path / "studies" / "digits-forecast" / "report.html").is_file()
