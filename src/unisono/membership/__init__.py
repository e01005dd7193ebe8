"""Who takes part: where this worker stands, and forming a generation."""
