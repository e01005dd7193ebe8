"""Rehearsing failures: faults as data, what carries them out and checks what came of them. Warm starts for tests."""

from unisono.testing.commands import start
from unisono.testing.faults import Faults
from unisono.testing.warm_jobs import warm_jobs

__all__ = ["Faults", "start", "warm_jobs"]
