"""Fault injection: fault plans, the injection of faults, and the check of the result."""
