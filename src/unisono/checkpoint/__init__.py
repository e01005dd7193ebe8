"""State on disk: run folders, and checkpoints that know nothing of ranks.

Begin with checkpoint_store.py (which checkpoints there are) and codec.py (the bytes of one).
It may import `plan` and what lies below it; it knows nothing of runs.
"""
