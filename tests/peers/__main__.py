"""`make test-peers`: the tests of trainings and callbacks that Keras ships, with Keras alone and on a run, as a table.

The exit code is 1 if fewer than 95 % of those that pass alone pass on a run, or if weights depend on the workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import keras
import pytest

AIM = 0.95
SOURCE = Path(str(keras.__file__)).parent / "src"
TRAINER = SOURCE / "trainers" / "trainer_test.py"

LEFT_OUT = ("remote_monitor_test.py", "tensorboard_test.py", "orbax_checkpoint_test.py")
"""Files that need a conftest which is not shipped, or packages that write for others."""

NAMES = "not jit and not grain and not jax"
"""Tests by their names: a run compiles no step, and the others need what a user of torch has not."""


def arguments(settings: Path) -> list[str]:
    """Arguments of pytest; ``settings`` is a file for its settings, since ours would refuse warnings."""
    settings.write_text("[pytest]\n")
    plugins = ["-p", "no:cacheprovider", "-p", "peers.keras_on_unisono"]
    return ["-q", "-c", str(settings), *plugins, "-W", "ignore", "--timeout=120", "-k", NAMES]


def carry_out(command: Sequence[str], folder: str) -> None:
    """Start a command and wait for it; it may have failed tests."""
    variables = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-m", *command], cwd=folder, env=variables, check=False, stdout=subprocess.DEVNULL)


def results(shards: int) -> Mapping[str, str]:
    """Run the tests with so many shards, or with Keras alone. Return why each fails by name, empty if it passes."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        report = Path(folder) / "report.xml"
        command = ["pytest", *arguments(Path(folder) / "pytest.ini"), f"--shards={shards}", f"--junitxml={report}"]
        command += [f"--ignore={SOURCE}/callbacks/{name}" for name in LEFT_OUT]
        carry_out([*command, str(TRAINER), str(SOURCE / "callbacks")], folder)
        cases = ElementTree.parse(report).iter("testcase")  # noqa: S314 (pytest has just written it)
        return {_name(case): _reason(case) for case in cases if case.find("skipped") is None}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"


def _reason(case: ElementTree.Element) -> str:
    failure = case.find("failure")
    failure = case.find("error") if failure is None else failure
    return "" if failure is None else failure.get("message", "").partition("\n")[0] or "fails"


def digests(workers: int) -> list[str]:
    """The tests of trainings on so many workers, each with the digest of its weights."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        file = Path(folder) / "digests"
        file.touch()
        run = ["unisono", "run", "-n", str(workers), "--run-dir", f"{folder}/run", __file__]
        carry_out([*run, *arguments(Path(folder) / "pytest.ini"), "--shards=8", f"--digests={file}"], folder)
        return sorted(file.read_text().splitlines())


def main() -> int:
    """Write the table."""
    alone, ours = results(0), results(1)
    counted = [name for name, reason in alone.items() if not reason]
    failed = {name: ours.get(name, "did not run") for name in counted if ours.get(name, "did not run")}
    print(f"{len(counted)} of Keras' tests pass alone, and {len(counted) - len(failed)} of them on Unisono")  # noqa: T201
    for name, reason in failed.items():
        print(f"  {name}: {reason[:150]}")  # noqa: T201
    one, *others = (digests(workers) for workers in (1, 2, 3))
    is_equal = bool(one) and all(other == one for other in others)
    print(f"weights of {len(one)} models in them: 1, 2 and 3 workers have {'the same' if is_equal else 'OTHER'} bits")  # noqa: T201
    return int(not counted or len(failed) > (1 - AIM) * len(counted) or not is_equal)


if __name__ == "__main__":
    sys.exit(pytest.main([*sys.argv[1:], str(TRAINER)]) if sys.argv[1:] else main())
