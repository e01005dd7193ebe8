"""Jobs whose workers come and go: the agent of a host, and how the coordinator is reached.

agent.py keeps the workers of a host, host_agents.py the agents of all hosts, coordinator_process.py the coordinator.
It may import what `launch` may, and `launch/local`.
"""
