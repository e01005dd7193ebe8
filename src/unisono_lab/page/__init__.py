"""The live page of a run, which shows its run folder and its coordinator's status in a browser."""
