"""Jobs of Slurm: their script, and how it is submitted."""
