"""Models in slices: the bits of the job that has none, on any number of devices and workers."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import python
from launches import Launches, launches
from unisono.checkpoint.checkpoint_store import load_weights
from unisono.train.model.tensors import digest_tensors

pytestmark = pytest.mark.procs

SCRIPT = str(Path(__file__).parent / "scripts" / "sliced.py")
CASES = {"language", "clipped", "residual", "unused", "meta", "matrices", "images", "narrow", "pairs", "parts"}
QUICK = ("language", "unused", "matrices", "narrow", "pairs", "parts")


def results(output: str) -> dict[str, list[str]]:
    """What the script has printed of each model: digest of the weights, last loss, sum of predictions."""
    lines = [line.removeprefix("[rank 0] ").split() for line in output.splitlines()]
    return {words[0]: words[1:] for words in lines if words and words[0] in CASES}


@pytest.fixture(scope="module")
def launched() -> Iterator[Launches]:
    with launches({**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"}) as found:
        yield found


@pytest.fixture(scope="module")
def serial(launched: Launches, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return results(launched(1, SCRIPT, *QUICK, folder=tmp_path_factory.mktemp("serial") / "run"))


@pytest.fixture(scope="module")
def all_serial(
    serial: dict[str, list[str]], launched: Launches, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    others = sorted(CASES - {*QUICK})
    found = serial | results(launched(1, SCRIPT, *others, folder=tmp_path_factory.mktemp("serial") / "run"))
    assert found.keys() == CASES
    return found


slow = pytest.mark.slow


def test_models_in_slices_end_with_the_bits_of_whole_ones(
    serial: dict[str, list[str]], launched: Launches, tmp_path: Path
) -> None:
    assert serial.keys() == {*QUICK}
    found = results(launched(4, SCRIPT, *QUICK, folder=tmp_path / "run", UNISONO_DEVICES_PER_WORKER="2"))
    assert found == serial


@slow
@pytest.mark.parametrize(("workers", "devices"), [(2, 2), (1, 2), (1, 3), (3, 2), (2, 3), (1, 5), (5, 1), (1, 8)])
def test_more_models_end_with_the_same_bits_on_any_number_of_workers_and_devices(
    workers: int, devices: int, all_serial: dict[str, list[str]], launched: Launches, tmp_path: Path
) -> None:
    told = {"UNISONO_DEVICES_PER_WORKER": str(devices)}
    assert results(launched(workers * devices, SCRIPT, folder=tmp_path / "run", **told)) == all_serial


@slow
def test_a_checkpoint_of_four_devices_goes_on_with_other_numbers_of_them(
    serial: dict[str, list[str]], launched: Launches, tmp_path: Path
) -> None:
    told = {"UNISONO_DEVICES_PER_WORKER": "4", "UNISONO_STOP_AFTER": "3", "UNISONO_CHECKPOINT_EVERY": "2"}
    said = launched(4, SCRIPT, "language", folder=tmp_path / "run", **told)
    assert results(said)["language"] != serial["language"]
    written = tmp_path / "run" / "checkpoints" / "step-00000003"
    sizes = [path.stat().st_size for path in written.glob("optimizer*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 0.4 * sum(sizes)
    assert digest_tensors(load_weights(written))[:16] == results(said)["language"][0]
    for processes, devices in ((1, 1), (3, 3), (4, 2)):
        folder = tmp_path / f"{processes}-{devices}"
        shutil.copytree(tmp_path / "run", folder)
        said = launched(processes, SCRIPT, "language", folder=folder, UNISONO_DEVICES_PER_WORKER=str(devices))
        assert "resumes after step 3" in said
        assert results(said)["language"] == serial["language"]


@pytest.mark.parametrize("way", ["slices", "stages"])
@pytest.mark.parametrize("on_nan", ["skip", pytest.param("stop", marks=slow)])
def test_nothing_is_updated_from_a_gradient_that_is_nan(
    on_nan: str, way: str, launched: Launches, tmp_path: Path
) -> None:
    told = {"UNISONO_DEVICES_PER_WORKER": "2"}
    said = launched(2, SCRIPT.replace("sliced", "not_finite"), on_nan, way, folder=tmp_path / "run", **told)
    seen = re.findall(r"step (\d+) loss \S+ is_finite=True changed=(\w+)", said)
    trouble = "step 4: the gradient of body.weight is nan in one of shards 0 to 3; nothing was updated"
    if on_nan == "stop":
        assert f"after True {trouble}" in said
    assert [int(step) for step, changed in seen if changed == "False"] == ([4, 10] if on_nan == "skip" else [])
    assert len(seen) == (12 if on_nan == "skip" else 4)


def test_what_cannot_be_in_slices_is_refused_by_name(launched: Launches, tmp_path: Path) -> None:
    said = launched(2, SCRIPT, "refused", folder=tmp_path / "run", UNISONO_DEVICES_PER_WORKER="2")
    words = [line.removeprefix("[rank 0] ModelError: ") for line in said.splitlines() if "Error: " in line]
    begins = [
        "AdamW(fused=True) gives an element other bits",
        "Adafactor may need whole tensors",
        "2.scale is a single number",
        "run.fully_shard: 0.weight of an earlier call and 1.weight are one parameter (tied weights)",
        "weight is no part of a model in slices, and each worker has 2 devices",
        "1.weight is no part of a model in slices",
        "Scalar (Scalar) is on the meta device",
        "KFAC: the weight of the model lies in slices on several devices: use one device per worker",
        "with run.fully_shard, Muon.step can have no hooks",
        "[rank 0] JobError: run.curvature needs whole weights, and each worker has 2 devices, which hold parts of them",
        "step 0, shard 0, rank 0: shards that the devices compute at the same time call different modules: "
        "one calls 'first', another one 'second'; but",
        "step 0, shard 0, rank 0: shards that the devices compute at the same time call different modules: "
        "one calls 'first', another one nothing more; but",
    ]
    assert [word for word, begin in zip(words, begins, strict=True) if not word.startswith(begin)] == []


@slow
def test_verify_compares_devices_moment_by_moment_with_one(tmp_path: Path) -> None:
    options = ("--workers", "1,2,3,4", "--fsdp", "--steps", "2")
    done = python("-m", "unisono", "verify", *options, SCRIPT, "unused", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "bit for bit, with 1, 1 × 2, 1 × 3, 1 × 4 and 2 × 2 workers (× devices), after each of 2 steps" in done.stdout
    )
