"""The facts about a machine, and the problems among them."""
