"""Questions to the host: its cores, memory, control groups, processes and users."""
