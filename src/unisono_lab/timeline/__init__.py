"""What workers did when, step by step: read, put on one clock, and explained."""
