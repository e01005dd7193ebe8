"""The loop over a data set: which steps it has, what they load, and evaluation."""
