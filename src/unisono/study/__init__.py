"""What can be learned from runs that are recorded."""
