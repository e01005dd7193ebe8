"""Shared fork servers: what many jobs of the suite would load, a few processes have loaded, and fork."""
