"""Rehearsing failures: faults as data, what carries them out and checks what came of them. Warm starts for tests."""

from unisono.testing.commands import start, warm_jobs
from unisono.testing.faults import Faults

__all__ = ["Faults", "start", "warm_jobs"]
