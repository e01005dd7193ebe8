"""Fault injection: fault plans, what injects them, and what checks the result."""
