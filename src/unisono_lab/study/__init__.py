"""A scaling study: what is measured, the runs that measure it, and what follows from the figures."""
