"""`make test-peers`: the tests of trainings and callbacks that Keras ships, with Keras alone and on a run, as a table.

The exit code is 1 if fewer than 95 % of those that pass alone pass on a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import keras

AIM = 0.95
LEFT_OUT = ("remote_monitor_test.py", "tensorboard_test.py", "orbax_checkpoint_test.py")
"""Files that need a conftest which is not shipped, or packages that write for others."""

NAMES = "not jit and not grain and not jax"
"""Tests by their names: a run compiles no step, and the others need what a user of torch has not."""


def results(workers: int) -> Mapping[str, str]:
    """Run the tests on so many workers, or with Keras alone. Return why each fails by name, empty if it passes."""
    source = Path(str(keras.__file__)).parent / "src"
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        report, settings = Path(folder) / "report.xml", Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\n")  # ours would refuse their warnings
        command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "-p", "no:cacheprovider", "-W", "ignore"]
        command += ["-p", "peers.keras_on_unisono", f"--workers={workers}", "--timeout=120", "-k", NAMES]
        command += [f"--ignore={source}/callbacks/{name}" for name in LEFT_OUT]
        command += [f"--junitxml={report}", f"{source}/trainers/trainer_test.py", f"{source}/callbacks"]
        variables = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run(command, cwd=folder, env=variables, check=False, stdout=subprocess.DEVNULL)
        cases = ElementTree.parse(report).iter("testcase")  # noqa: S314 (pytest has just written it)
        return {_name(case): _reason(case) for case in cases if case.find("skipped") is None}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"


def _reason(case: ElementTree.Element) -> str:
    failure = case.find("failure")
    failure = case.find("error") if failure is None else failure
    return "" if failure is None else failure.get("message", "").partition("\n")[0] or "fails"


def main() -> int:
    """Write the table."""
    alone, ours = results(0), results(1)
    counted = [name for name, reason in alone.items() if not reason]
    failed = {name: ours.get(name, "did not run") for name in counted if ours.get(name, "did not run")}
    print(f"{len(counted)} of Keras' tests pass alone, and {len(counted) - len(failed)} of them on Unisono")  # noqa: T201
    for name, reason in failed.items():
        print(f"  {name}: {reason[:150]}")  # noqa: T201
    return int(not counted or len(failed) > (1 - AIM) * len(counted))


if __name__ == "__main__":
    sys.exit(main())
