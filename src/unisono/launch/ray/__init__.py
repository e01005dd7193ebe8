"""Jobs on the nodes of a Ray cluster: an actor keeps the coordinator, and one on each bundle runs an agent."""

from unisono.launch.ray.driver import run

__all__ = ["run"]
