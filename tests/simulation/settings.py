"""Numbers that all of the simulation shares."""

TIMEOUT_S = 10.0
SHARDS = 6
FAULTS_END_S = 40.0
OVER_BY_S = 400.0
"""Faults end, and the job is over, in the schedule's time."""
