"""From gradients to their sum: buckets, partial sums, and the ways they travel."""
