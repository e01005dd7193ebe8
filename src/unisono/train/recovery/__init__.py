"""Finding a state that is wrong, and the one to go back to."""
