"""From a data set to this worker's shards."""
