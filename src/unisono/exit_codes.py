"""What exit codes of commands, workers and coordinators mean, beside 0 (all is well) and 1 (it failed)."""

USAGE = 2
"""It cannot work with what it was given: whoever typed can mend it."""

PREEMPTED = 75
"""It ended before it was done, and can be started again: a worker left with a checkpoint, a coordinator ended before
its job."""

NOT_STARTED = 126
"""The system would not start it, as shells have it."""

FIRST_SIGNAL = 128
"""A process that a signal ended has, for a shell, the exit code 128 + the signal's number."""
