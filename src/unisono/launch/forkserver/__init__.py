"""Processes that have loaded torch already, and fork workers."""
