"""The ends of workers and jobs, and the messages about them."""
