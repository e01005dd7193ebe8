"""What is asked of the host: its cores, memory, control groups, processes and users."""
