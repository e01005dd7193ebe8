"""Comparing the runs of a script on several numbers of workers."""
