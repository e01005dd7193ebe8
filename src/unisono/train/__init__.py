"""What users touch: the run, its steps, and what is built from them."""
