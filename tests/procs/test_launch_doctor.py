import json
from pathlib import Path

import pytest

from commands import python
from unisono.launch import doctor

pytestmark = pytest.mark.procs


@pytest.mark.slow
def test_the_doctor_finds_that_workers_reach_each_other_here(tmp_path: Path) -> None:
    found = python("-m", "unisono", "doctor", "--json", cwd=tmp_path)
    assert found.returncode == 0
    diagnosis = json.loads(found.stdout)
    assert diagnosis["workers"]["gloo"].startswith("works, with 2 workers")
    assert diagnosis["torch"]["version"]
    assert isinstance(diagnosis["problems"], list)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_backend_that_does_not_work_is_said_with_its_reason() -> None:
    assert doctor.handshake("pigeon", 2).startswith("fails: rank ")


def test_a_torch_that_cannot_be_loaded_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libgomp.so.1: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"exit code 1: ImportError: libgomp\.so\.1"):
        doctor.torch()
