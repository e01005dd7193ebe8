"""What is found on a machine, and what in it is a problem."""
