"""The workers that train together: who they are, how they connect, and their collective calls."""
