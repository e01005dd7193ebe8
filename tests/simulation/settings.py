"""Numbers that all of the simulation shares."""

TIMEOUT_S = 10.0
SHARDS = 6
PROBING_S = 2.0
FORMING_S = 4.0
"""After which a probe, or forming a generation, is given up."""

FAULTS_END_S = 40.0
OVER_BY_S = 400.0
"""Faults end, and the job is over, in the schedule's time."""
