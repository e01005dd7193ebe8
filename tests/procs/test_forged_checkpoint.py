"""A checkpoint whose digests are right and which lies about what its bytes are ends in an error, not in a crash."""

from pathlib import Path
from typing import Any

import pytest

from commands import python
from forged import forge, state_json

pytestmark = pytest.mark.procs

READS = """
import sys
from unisono.checkpoint.checkpoint_store import load_weights
from unisono.errors import CheckpointError
try:
    print(repr(load_weights(sys.argv[1])))
except CheckpointError as error:
    print("refused:", error)
"""
POINTER = "41" * 8
FORGED: dict[str, Any] = {
    "a number that is an object": {"~": ["number", "|O", POINTER]},
    "an array of objects": {"~": ["array", "|O", [0, 1]]},
    "a number with an object in it": {"~": ["number", "O,i8", 2 * POINTER]},
}


@pytest.mark.parametrize(
    "skeleton",
    [
        pytest.param(skeleton, marks=pytest.mark.slow, id=name)
        for name, skeleton in FORGED.items()
        if "array" not in name
    ]
    + [pytest.param(FORGED["an array of objects"], id="an array of objects")],
)
def test_bytes_never_become_an_object_of_python(tmp_path: Path, skeleton: Any) -> None:
    folder = forge(tmp_path / "step-00000001", {"state.json": state_json({"weight": skeleton})})

    read = python("-c", READS, folder)

    assert read.returncode == 0, f"{read.returncode}: {read.stdout}{read.stderr}"
    assert read.stdout.startswith("refused: "), read.stdout
