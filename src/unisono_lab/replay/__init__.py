"""A recorded run: its timeline, and what policies would have done in it."""
