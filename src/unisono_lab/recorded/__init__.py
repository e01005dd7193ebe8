"""A recorded run: its events and steps, the timelines of its workers, and the replay of policies.

record.py reads a run folder, policy_replay.py asks policies again, worker_spans.py reads timelines.
It may import the core, `faults` and `journal_events`.
"""
