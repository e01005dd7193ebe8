"""What the shards' losses say of the samples' losses."""

from collections.abc import Sequence


def loss_variance(losses: Sequence[float], sizes: Sequence[float]) -> float | None:
    """An unbiased estimate of the variance of one sample's loss, from the means over shards.

    With means l over b samples each, and l̄ over all of them: Σ b (l - l̄)² / (S - 1), where S is the number of shards.

    Args:
        losses: the mean of each shard, without empty ones.
        sizes: the shards' numbers of samples.

    Returns:
        None if there are fewer than two shards.
    """
    if len(losses) < 2:
        return None
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    return sum(size * (loss - mean) ** 2 for loss, size in zip(losses, sizes, strict=True)) / (len(losses) - 1)
