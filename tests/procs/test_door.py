"""What `import unisono` loads: the door, and nothing behind it."""

import pytest

from commands import python

pytestmark = pytest.mark.procs

HEAVY = ("torch", "numpy", "pydantic", "rich", "typer")


def test_importing_unisono_loads_nothing_heavy() -> None:
    script = f"import sys, unisono; print(*[name for name in {HEAVY} if name in sys.modules])"

    assert python("-c", script).stdout == "\n"
