"""The strategies whose workers have weights of their own between synchronisations, at work."""
