"""The examples run from end to end, and end in the same weights on one worker and on several."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from commands import completed
from examples.cifar10_images import RECORD_BYTES, TEST_FILES, TRAIN_FILES
from serial_runs import SerialRuns

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300), pytest.mark.usefixtures("warm", "serial_launches")]

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Finished:
    """What is left of an example that has run.

    Attributes:
        output: what it printed.
        run_dir: its run folder.
    """

    output: str
    run_dir: Path

    @property
    def weights(self) -> str:
        found = re.findall(r"weights sha256 ([0-9a-f]{64})", self.output)
        assert len(found) == 1, self.output  # the main worker prints it, once
        return str(found[0])

    @property
    def result(self) -> dict[str, object]:
        result = json.loads((self.run_dir / "result.json").read_text())
        assert isinstance(result, dict)
        return result


def on(workers: int | None, *script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script on so many workers; without a number, as plain Python."""
    environment = {**os.environ, **variables}
    if workers is not None:
        return completed("run", "-n", workers, *script, cwd=folder, env=environment, timeout=240, is_merged=True)
    return subprocess.run(
        [sys.executable, *script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )


def run(folder: Path, command: str, workers: int | None = None, steps: int = 3) -> Finished:
    """Run an example for a few steps in a folder of its own; without ``workers``, as plain Python."""
    folder.mkdir()
    script, *flags = command.split()
    done = on(
        workers, str(EXAMPLES / script), *flags, folder=folder, UNISONO_STOP_AFTER=str(steps), UNISONO_RUN_DIR="run"
    )
    assert done.returncode == 0, done.stdout
    return Finished(done.stdout, folder / "run")


def run_serially(serial_runs: SerialRuns, command: str, steps: int = 3) -> Finished:
    """Run an example for a few steps on one worker."""
    script, *flags = command.split()
    trained = serial_runs(EXAMPLES / script, *flags, UNISONO_STOP_AFTER=str(steps))
    return Finished(trained.output.read_text(), trained.run_dir)


SHORT = {
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


QUICK = {command for command in SHORT if command.startswith(("digits", "plain_loop"))}
"""Those that every change must pass; the others run at night."""


EndedExamples = Callable[[bool], tuple[Ended, Ended]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, warm: None) -> EndedExamples:
    """How the quick examples, or the others, end as plain Python, and on several workers."""

    @cache
    def ended(are_quick: bool) -> tuple[Ended, Ended]:
        chosen = {command: workers for command, workers in SHORT.items() if (command in QUICK) == are_quick}
        alone, together = run_all(tmp_path_factory.mktemp("alone"), list(chosen)), Ended()
        for number in set(chosen.values()):
            commands = [command for command, workers in chosen.items() if workers == number]
            together |= run_all(tmp_path_factory.mktemp("together"), commands, number)
        return alone, together

    return ended


@pytest.mark.parametrize(
    "command", [command if command in QUICK else pytest.param(command, marks=pytest.mark.slow) for command in SHORT]
)
def test_an_example_ends_in_the_same_weights_on_one_worker_and_on_several(command: str, ended: EndedExamples) -> None:
    alone, together = ended(command in QUICK)
    assert alone[command]["weights_sha256"] == together[command]["weights_sha256"]
    assert (alone[command]["world_size"], together[command]["world_size"]) == (1, SHORT[command])
    assert alone[command]["steps"] == together[command]["steps"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("command", FURTHER)
def test_a_frameworks_second_example_ends_in_the_same_weights_too(command: str, tmp_path: Path) -> None:
    for folder in ("alone", "together"):
        (tmp_path / folder).mkdir()
    alone, together = (
        run_all(tmp_path / "alone", [command])[command],
        run_all(tmp_path / "together", [command], FURTHER[command])[command],
    )
    assert alone["weights_sha256"] == together["weights_sha256"]
    assert alone["steps"] == together["steps"] == 3


@pytest.mark.slow
def test_digits_reaches_97_percent_on_held_out_images_whatever_the_number_of_workers(
    serial_runs: SerialRuns, tmp_path: Path
) -> None:
    alone = run_serially(serial_runs, "digits.py --epochs 6", steps=1000)
    together = run(tmp_path / "together", "digits.py --epochs 6", workers=3, steps=1000)
    accuracies = [re.findall(r"accuracy ([\d.]+)%", done.output) for done in (alone, together)]
    assert len(accuracies[0]) == 6
    assert float(accuracies[0][-1]) >= 97
    assert accuracies[0] == accuracies[1]
    assert alone.weights == together.weights


@pytest.mark.slow
def test_real_images_are_augmented_alike_on_any_number_of_workers_and_loader_processes(
    serial_runs: SerialRuns, tmp_path: Path
) -> None:
    images = tmp_path / "cifar-10-batches-bin"
    images.mkdir()
    random = np.random.default_rng(0)
    for name in TRAIN_FILES + TEST_FILES:
        records = random.integers(0, 256, (20, RECORD_BYTES), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(images / name)
    command = f"cifar10.py --data-dir {images} --batch-size 64 --epochs 1 --loader-workers"
    alone = run_serially(serial_runs, f"{command} 0")
    together = run(tmp_path / "together", f"{command} 1", workers=3)
    assert alone.weights == together.weights
    assert "epoch 0" in alone.output


@pytest.mark.slow
def test_another_number_of_workers_synchronises_in_another_way(serial_runs: SerialRuns, tmp_path: Path) -> None:
    alone = run_serially(serial_runs, "strategies.py --epochs 2", steps=1000)
    together = run(tmp_path / "together", "strategies.py --epochs 2", workers=2, steps=1000)
    assert re.findall(r"epoch \d: (.+), acc", alone.output) == ["all-reduce among 1"] * 2
    assert re.findall(r"epoch \d: (.+), acc", together.output) == ["local-sgd:every=4 among 2"] * 2
    assert alone.weights != together.weights


@pytest.mark.slow
def test_cifar10_can_be_tried_without_the_data(serial_runs: SerialRuns) -> None:
    done = run_serially(serial_runs, "cifar10.py --synthetic --batch-size 32 --max-steps 2")
    assert done.result["steps"] == 2


@pytest.mark.slow
def test_the_plain_loop_runs_without_unisono(tmp_path: Path) -> None:
    done = run(tmp_path / "plain", "plain_loop.py --which plain")
    epochs = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    losses = [epoch["loss"] for epoch in epochs]
    assert [epoch["samples"] for epoch in epochs] == [1797] * 5  # as a study reads it
    assert losses[-1] < losses[0] / 2
