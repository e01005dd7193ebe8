"""Rehearsing failures: faults as data, and what carries them out and checks what came of them."""

from unisono.testing.faults import Faults

__all__ = ["Faults"]
