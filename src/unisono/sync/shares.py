"""Which server holds which tensors."""

from collections.abc import Sequence


def shares(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Share tensors out so that all servers hold about as many bytes: the largest ones first, each to the emptiest.

    Args:
        sizes: bytes of each tensor.
        servers: how many there are, at least 1.

    Returns:
        the numbers of each server's tensors, in order; the same for the same sizes.
    """
    held: list[list[int]] = [[] for _ in range(servers)]
    filled = [0] * servers
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        emptiest = min(range(servers), key=lambda server: (filled[server], server))
        held[emptiest].append(number)
        filled[emptiest] += sizes[number]
    return [sorted(numbers) for numbers in held]
