"""Optimizers that go by curvature."""
