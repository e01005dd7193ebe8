"""Fault injection: fault plans, what injects them, and what checks the result."""

from unisono.testing.faults import Faults

__all__ = ["Faults"]
