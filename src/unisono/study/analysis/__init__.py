"""What follows from the figures of a scaling study."""
