"""Running what a study measures, and reading what came of it."""
