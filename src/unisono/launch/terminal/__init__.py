"""The workers' output in the launcher's terminal: their lines, with each one's name."""
