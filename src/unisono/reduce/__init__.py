"""The reduction of gradients: buckets, partial sums, and the transports between workers."""
