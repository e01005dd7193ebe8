"""What a worker is called: by its rank, or by its id where workers come and go and ranks change."""

WorkerName = int | str


def label(worker: WorkerName) -> str:
    """``rank 1``, or ``w3``: before each line of its output."""
    return f"rank {worker}" if isinstance(worker, int) else worker


def called(worker: WorkerName) -> str:
    """``rank 1``, or ``worker w3``: in a sentence."""
    return f"rank {worker}" if isinstance(worker, int) else f"worker {worker}"


def number(worker: WorkerName) -> int:
    """A number that neighbours do not share, for colours."""
    return worker if isinstance(worker, int) else int("0" + "".join(filter(str.isdecimal, worker)))
