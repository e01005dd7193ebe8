"""Fault injection: fault plans, what injects them, and what checks the result. Warm starts for tests."""

from unisono.testing.commands import start, warm_jobs
from unisono.testing.faults import Faults

__all__ = ["Faults", "start", "warm_jobs"]
