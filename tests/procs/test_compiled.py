"""A compiled model: the same weights whichever shape a worker met first."""

import os
import re
from pathlib import Path

import pytest

from launches import launches

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(700)]

SCRIPT = str(Path(__file__).parent / "scripts" / "compiled.py")


def test_a_model_that_is_compiled_ends_in_the_same_weights_on_any_number_of_workers(tmp_path: Path) -> None:
    digests = []
    with launches({**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}) as launched:
        for workers in (1, 2, 3):
            said = launched(workers, SCRIPT, folder=tmp_path / f"{workers}")
            digests += re.findall("weights sha256 [0-9a-f]{64}", said)
    assert digests == digests[:1] * 3
