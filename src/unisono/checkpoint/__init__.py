"""State on disk: run folders, and checkpoints that know nothing of ranks."""
