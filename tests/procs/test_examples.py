"""The examples run from end to end, and end in the same weights on one worker and on several."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from commands import completed, python

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

EXAMPLES = Path(__file__).parents[2] / "examples"


def on(workers: int | None, *script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script on so many workers; without a number, as plain Python."""
    told = {**os.environ, **variables}
    if workers is None:
        return python(*script, cwd=folder, env=told, timeout=240, is_merged=True)
    return completed("run", "-n", workers, *script, cwd=folder, env=told, timeout=240, is_merged=True)


SHORT = {
    "cifar10.py --synthetic --batch-size 32": 2,
    "char_lm.py --layers 1 --width 32 --context 32 --steps 3": 3,
    "large_gpt.py --layers 4 --width 32 --context 16": 2,
    "gan.py": 2,
    "digits.py": 2,
    "kfac.py": 3,
    "keras_convnet.py": 2,
    "lightning_autoencoder.py": 2,
    "transformers_clm.py --layers 1 --samples 200": 2,
    "accelerate_nlp.py --gradient_accumulation_steps 2": 2,
    "plain_loop.py --which unisono": 2,
    "goodput.py": 2,
    "scaling.py": 2,
    "spot.py": 2,
    "schedules.py": 2,
    "slow_worker.py --shard-ms 0": 3,
    "resnet_cifar10.py --image-size 32 --width 0.125 --synthetic --batch-size 16 --workers 2": 2,
}
"""Examples, each with the number of workers that it is tried on.

Those of frameworks are tried on two: each worker imports them, and tests/unit has the frameworks on more. Those of
Keras are tried on the same: it numbers the layers of a process, and their names are part of the digest.
"""

FURTHER = {"keras_train_step.py": 3, "lightning_classifier.py": 3, "transformers_classification.py": 3}
"""Second ones of a framework."""

ENDS = "HOST_PROCESS.get().script_end.reached()\n"
"""Runs that end with their script do so."""

Ended = dict[str, dict[str, object]]
"""The results of examples."""


def run_all(folder: Path, commands: Sequence[str], workers: int | None = None) -> Ended:
    """Run three steps of each, one after the other in the same processes: torch is loaded once."""
    calls = "".join(
        f"sys.argv = {[name, *flags]!r}\nrunpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')\n{ENDS}"
        for name, *flags in map(str.split, commands)
    )
    begin = f"import runpy, sys\nfrom unisono.train.start import HOST_PROCESS\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
    (folder / "all.py").write_text(begin + calls)
    done = on(workers, "all.py", folder=folder, UNISONO_STOP_AFTER="3", UNISONO_RUN_DIR="run")
    assert done.returncode == 0, done.stdout
    paths = [folder / "run", *(folder / "run" / f"run-{number}" for number in range(2, len(commands) + 1))]
    results = [json.loads((path / "result.json").read_text()) for path in paths]
    said = re.findall(r"weights sha256 ([0-9a-f]{64})", done.stdout)
    assert said == [result["weights_sha256"] for result in results], done.stdout  # the main worker prints it, once
    return dict(zip(commands, results, strict=True))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, warm: None) -> tuple[Ended, Ended]:
    """How the examples end as plain Python, and on several workers."""
    alone, together = run_all(tmp_path_factory.mktemp("alone"), list(SHORT)), Ended()
    for number in set(SHORT.values()):
        commands = [command for command, workers in SHORT.items() if workers == number]
        together |= run_all(tmp_path_factory.mktemp("together"), commands, number)
    return alone, together


@pytest.mark.slow  # the README's quick start and the demo run a loop like theirs
@pytest.mark.parametrize("command", SHORT)
def test_an_example_ends_in_the_same_weights_on_one_worker_and_on_several(
    command: str, ended: tuple[Ended, Ended]
) -> None:
    alone, together = ended
    assert alone[command]["weights_sha256"] == together[command]["weights_sha256"]
    assert (alone[command]["world_size"], together[command]["world_size"]) == (1, SHORT[command])
    assert alone[command]["steps"] == together[command]["steps"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("command", FURTHER)
def test_a_frameworks_second_example_ends_in_the_same_weights_too(command: str, tmp_path: Path) -> None:
    for folder in ("alone", "together"):
        (tmp_path / folder).mkdir()
    alone = run_all(tmp_path / "alone", [command])[command]
    together = run_all(tmp_path / "together", [command], FURTHER[command])[command]
    assert alone["weights_sha256"] == together["weights_sha256"]
    assert alone["steps"] == together["steps"] == 3


@pytest.mark.slow
def test_another_number_of_workers_synchronises_in_another_way(tmp_path: Path) -> None:
    for workers, way in ((1, "all-reduce among 1"), (2, "local-sgd:every=4 among 2")):
        done = on(workers, str(EXAMPLES / "strategies.py"), "--epochs", "2", folder=tmp_path)
        assert re.findall(r"epoch \d: (.+), acc", done.stdout) == [way] * 2, done.stdout


@pytest.mark.slow
def test_the_plain_loop_runs_without_unisono(tmp_path: Path) -> None:
    done = on(None, str(EXAMPLES / "plain_loop.py"), "--which", "plain", folder=tmp_path)
    epochs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    losses = [epoch["loss"] for epoch in epochs]
    assert [epoch["samples"] for epoch in epochs] == [1797] * 5  # as a study reads it
    assert losses[-1] < losses[0] / 2
