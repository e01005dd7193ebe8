"""The plan that follows from a job by arithmetic alone: no torch, no clock, no socket, no environment.

Begin with order.py (which sample when), split.py (who computes what) and tree.py (the order of sums).
It may import `job` and what lies below it; functions of values alone.
"""
