"""Synchronisation strategies: how the weights of several workers become those of one model."""
