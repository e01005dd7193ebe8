"""What a run writes down and shows about its steps."""
