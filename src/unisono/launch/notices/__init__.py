"""Notices by which a cloud says that it takes a machine away."""
