"""A job in virtual time: the real coordinator's decisions and the real policies, on simulated hosts."""
