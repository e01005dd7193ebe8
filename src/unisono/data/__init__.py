"""The samples of this worker's shards, read from a data set."""
