"""What one worker gives the others."""


class Traffic:
    """Counts what others get from this worker: over a connection, or by reading its part of shared memory.

    Attributes:
        sent_bytes: so far.
        sent_messages: so far; a part of memory that others are told of is one for each of them.
    """

    def __init__(self) -> None:
        self.sent_bytes = self.sent_messages = 0

    def count(self, sent_bytes: int, sent_messages: int) -> None:
        """So much was sent."""
        self.sent_bytes += sent_bytes
        self.sent_messages += sent_messages

    def take(self) -> tuple[int, int]:
        """Bytes and messages since this was asked for last."""
        found = self.sent_bytes, self.sent_messages
        self.sent_bytes = self.sent_messages = 0
        return found
