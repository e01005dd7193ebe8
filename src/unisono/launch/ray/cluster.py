"""What is asked of Ray itself, in one place: bundles, and nodes. Needs a connection to a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

OWN_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources for which an actor has an option of their own."""


def draining_nodes() -> frozenset[str]:
    """The ids of nodes that are about to go: drained by a person or the autoscaler, or taken away by a spot market.

    Ray has no public way to ask. This is the one that Ray Train's own watcher takes.
    """
    return frozenset(ray._private.state.state.get_draining_nodes())


class Bundles:
    """The bundles of a job: those that it cannot begin without are placed together, all others one by one.

    Ray's autoscaler adds nodes for groups that wait. Ray removes them when the job has ended, also if it was killed.

    Args:
        bundle: the resources of each.
        smallest: the number without which the job cannot begin.
        largest: the number of all.
    """

    def __init__(self, bundle: Mapping[str, float], smallest: int, largest: int) -> None:
        self._bundle = dict(bundle)
        sizes = [smallest, *[1] * (largest - smallest)]
        self._groups = [placement_group([self._bundle] * size, strategy="PACK") for size in sizes]
        self._where = [(group, index) for group, size in zip(self._groups, sizes, strict=True) for index in range(size)]

    def __len__(self) -> int:
        return len(self._where)

    def nodes(self) -> Sequence[str]:
        """The id of each bundle's node; empty while it has none: Ray looks for one, again if a node has died."""
        table = placement_group_table()
        found = [table.get(group.id.hex(), {}).get("bundles_to_node_id", {}) for group, _ in self._where]
        return [nodes.get(index, "") for nodes, (_, index) in zip(found, self._where, strict=True)]

    def actor(self, place: int, kind: type, *args: Any) -> Any:
        """Have an actor started on a bundle, as soon as that is placed.

        Args:
            place: the number of the bundle.
            kind: the actor's class.
            args: what it is made with.
        """
        group, index = self._where[place]
        amounts = {OWN_OPTIONS[name]: self._bundle.get(name, 0) for name in OWN_OPTIONS}
        more = {name: amount for name, amount in self._bundle.items() if name not in OWN_OPTIONS}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {**amounts, "resources": more, "scheduling_strategy": strategy, "max_concurrency": 2}
        return ray.remote(kind).options(**options).remote(*args)

    def close(self) -> None:
        """Give all of them back."""
        for group in self._groups:
            remove_placement_group(group)


def beside_driver(kind: type, *args: Any) -> Any:
    """An actor that takes no resources, on the driver's node.

    Args:
        kind: the actor's class.
        args: what it is made with.
    """
    near = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=near, max_concurrency=2).remote(*args)
