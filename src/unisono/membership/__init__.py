"""Membership: this worker's rank, the coordinator, and the forming of generations."""
