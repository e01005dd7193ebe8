"""What `import unisono` loads: the door, and nothing behind it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.procs

HEAVY = ("torch", "numpy", "pydantic", "rich", "typer")


def test_importing_unisono_loads_nothing_heavy() -> None:
    script = f"import sys, unisono; print(*[name for name in {HEAVY} if name in sys.modules])"

    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert loaded.stdout.split() == []
