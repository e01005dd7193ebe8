"""The run inside a worker: the loops over data, their steps, recovery and records."""
