"""Jobs whose workers come and go: the agent of a host, and how the coordinator is reached."""
