"""The state of a run: what is kept, restored, and handed to a worker that joins."""
