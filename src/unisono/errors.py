"""Every error Unisono raises on purpose, as one tree; and what exit codes mean.

::

    UnisonoError
    ├── JobError (ValueError)          a setting, or a combination of settings, that cannot work
    │   └── JobMismatch                workers, or a run folder, that hold another job: lists the differences
    ├── DataError (ValueError)         a data set or a batch that cannot be used
    ├── ModelError (ValueError)        a model or optimizer that cannot be trained as it is
    ├── LossError (ValueError)         a loss that is no scalar
    │   └── NonFiniteLoss              a loss or gradient that is NaN or infinite: names step, shard and rank
    ├── UpdateRefused                  a part of the script that has refused the update of a step: says why
    ├── UnnamedState (ValueError)      state beside the model that no registry has, with strict=True: names it
    ├── PolicyError                    a policy that failed, or decided differently on two workers: names it
    ├── NondeterministicOperation      an operation that has no deterministic version: names it
    ├── MemoryFault                    memory or a processor that gave wrong bits, which cannot be mended
    ├── CheckpointError                a checkpoint that is damaged, missing or belongs elsewhere
    ├── Unreadable (ValueError)        bytes of a file, a socket or a store that are no valid value
    ├── LaunchError                    workers that could not be started
    ├── Superseded                     a worker that was cut off, and whose job goes on without it: it writes no more
    └── WorkerLost                     another worker is gone: a consequence, never the cause
        ├── NoProgress                 another worker gave no sign for as long as the run's faults.timeout_s
        └── JobEnded                   the job has ended while this worker was at work: says why

    UnisonoWarning (UserWarning)       something that works, and is probably not what was meant

``ValueError`` is for the user's mistake; an ``assert`` is for ours.
"""


class UnisonoError(Exception):
    """Base of every error that Unisono raises on purpose.

    Attributes:
        exit_code: the exit code of a worker whose script ends with this error.
        says_all: whether the message and the script's line say all that helps: a setting, a folder or a checkpoint was
            refused, and our own code has nothing to look for.
    """

    exit_code = 1
    says_all = False


class JobError(UnisonoError, ValueError):
    """A setting, or a combination of settings, that cannot work."""

    exit_code = 2
    says_all = True


class JobMismatch(JobError):
    """Workers, or a run folder, that hold another job than this one."""

    exit_code = 1


class DataError(UnisonoError, ValueError):
    """A data set or a batch that cannot be used."""


class ModelError(UnisonoError, ValueError):
    """A model or optimizer that cannot be trained as it is."""


class LossError(UnisonoError, ValueError):
    """A loss function that returned something else than a scalar mean."""


class NonFiniteLoss(LossError):
    """A loss or gradient that is NaN or infinite."""


class UpdateRefused(UnisonoError):
    """A part of the script's own has refused the update of a step."""


class UnnamedState(UnisonoError, ValueError):
    """State beside the model that changes, that the run does not keep, and that the script has not named."""

    says_all = True


class PolicyError(UnisonoError):
    """A policy that failed, wants what makes no sense, or decided differently on two workers."""


class NondeterministicOperation(UnisonoError, RuntimeError):
    """An operation without a deterministic version, in a job that promises the same bits."""


class MemoryFault(UnisonoError):
    """A host's memory or processor gave wrong bits, which cannot be mended."""


class CheckpointError(UnisonoError):
    """A checkpoint that is damaged, missing or belongs to another job."""

    says_all = True


class Unreadable(UnisonoError, ValueError):
    """Bytes of a file, a socket or a store that are no valid value."""


class LaunchError(UnisonoError):
    """Workers that could not be started."""


class Superseded(UnisonoError):
    """The job goes on without this worker, in another generation or start: it must not write into the run folder."""


class WorkerLost(UnisonoError):
    """Another worker of this generation is gone.

    It is the consequence of a failure elsewhere: reports put the cause first.
    """


class NoProgress(WorkerLost):
    """Another worker gave no sign for as long as the run's ``faults.timeout_s``."""

    exit_code = 124


class JobEnded(WorkerLost):
    """The job has ended elsewhere, and there is nobody left to train with."""


class Dismissed(SystemExit):
    """This worker takes part no more: its script ends here, as by ``sys.exit()``. It is no error, and not in the tree.

    If a script catches it, with ``except BaseException``, the next call of the run raises it again.

    Attributes:
        reason: the reason, for people.
        preempted: whether the job is to go on later, from a checkpoint that is this worker's to write.
    """

    def __init__(self, reason: str, *, preempted: bool = False, code: int = 0) -> None:
        super().__init__(code)
        self.reason = reason
        self.preempted = preempted


class UnisonoWarning(UserWarning):
    """Something that works, and is probably not what was meant."""


# What exit codes of commands, workers and coordinators mean, beside 0 (all is well) and 1 (it failed).

USAGE = 2
"""An argument or a setting cannot work: the person who typed the command can mend it."""

PREEMPTED = 75
"""The process ended before its work was done, and can be started again: a worker left with a checkpoint, or a
coordinator ended before its job."""

NOT_STARTED = 126
"""The system could not start the process; the same code as in shells."""

FIRST_SIGNAL = 128
"""A process that a signal ended has, in shells, the exit code 128 + the signal's number."""
