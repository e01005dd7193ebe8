"""The state of a run: what is kept, restored, and handed to a worker that joins.

registry.py holds whatever has a state; checkpoints.py writes and reads it.
It may import `group` of `train`, and what lies below it.
"""
