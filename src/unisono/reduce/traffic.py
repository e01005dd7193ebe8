"""What one worker gives the others."""

import threading


class Traffic:
    """Counts what others get from this worker: over a connection, or by reading its part of shared memory.

    Several threads may count.

    Attributes:
        sent_bytes: so far.
        sent_messages: so far; a part of memory that others are told of is one for each of them.
    """

    def __init__(self) -> None:
        self.sent_bytes = self.sent_messages = 0
        self._taken = 0, 0
        self._lock = threading.Lock()

    def count(self, sent_bytes: int, sent_messages: int) -> None:
        """So much was sent."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.sent_messages += sent_messages

    def take(self) -> tuple[int, int]:
        """Bytes and messages since this was asked for last."""
        with self._lock:
            taken, self._taken = self._taken, (self.sent_bytes, self.sent_messages)
            return self.sent_bytes - taken[0], self.sent_messages - taken[1]
