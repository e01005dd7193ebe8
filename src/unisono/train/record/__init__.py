"""The records and displays of a run's steps."""
