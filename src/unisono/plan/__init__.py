"""The plan that follows from a job by arithmetic alone: no torch, no clock, no socket, no environment."""
