"""What a module keeps of batches that it evaluates, or of shards without samples, is what Lightning alone has."""

from __future__ import annotations

import ast
import io
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning  # noqa: F401 (it sets a variable of the environment, which is no test's)
import pytest

from script_cluster import Cluster, Kill

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("torch_settings_restored"),
]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "lightning_keeps.py"


def last(printed: str) -> dict[str, float]:
    lines = {line.partition(" ")[2] for line in printed.splitlines() if line.startswith("after")}
    assert len(lines) == 1, printed  # all workers know the same
    values: dict[str, float] = ast.literal_eval(lines.pop())
    return values


@pytest.mark.parametrize(
    "kind",
    [
        "buffer",
        "trained",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("small", "number", "deque", "dict", "seldom")),
    ],
)
def test_any_number_of_workers_knows_what_lightning_alone_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as variables, redirect_stdout(io.StringIO()) as printed:
        variables.setenv("KIND", kind)
        variables.setenv("PLAIN", "1")
        runpy.run_path(str(SCRIPT))
    plain = last(printed.getvalue())

    def ended(workers: int | tuple[int, int], **how: Any) -> dict[str, float]:
        return last(Cluster(tmp_path / f"{workers}")(SCRIPT, workers, shards=6, KIND=kind, **how).printed)

    serial = ended(1)
    assert serial == pytest.approx(plain, abs=2e-4)
    assert ended(2) == ended(3) == ended((2, 2), kills=[Kill(5, 0)]) == serial
