"""What all workers have agreed to do at the next boundary."""


class Requests:
    """Set in a collective call, so that all workers have agreed on them, or none.

    Attributes:
        leave: a worker was asked to leave, and the job with it.
        regroup: a new generation is due.
    """

    def __init__(self) -> None:
        self.leave = self.regroup = False

    def note(self, *, leave: bool = False, regroup: bool = False) -> None:
        """Workers want this, too. In a change."""
        self.leave, self.regroup = self.leave or leave, self.regroup or regroup
