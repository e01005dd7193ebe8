"""Starts the nodes of a Ray cluster, and ends them, as lines of JSON ask for it; the first line says where it is."""

import json
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

sys.path.append(str(Path(__file__).parents[2]))
from metadata_service import Metadata, metadata_service

METRICS_PORT = 9400
"""At which the head's node shows Ray's metrics."""

cpus, head, *addresses = sys.argv[1:]
cluster = Cluster()
nodes: dict[str, Any] = {}
clouds: dict[str, Metadata] = {}
opened = ExitStack()


def add(address: str, count: int, cloud: str = "") -> str:
    more: dict[str, Any] = {}
    if not nodes:
        more = {"include_dashboard": False, "dashboard_host": head, "metrics_export_port": METRICS_PORT}
    service = opened.enter_context(metadata_service(cloud)) if cloud else None
    if service is not None:
        more["env_vars"] = service.variables
    node = cluster.add_node(num_cpus=count, node_ip_address=address, **more)
    if service is not None:
        clouds[node.node_id] = service
    nodes[node.node_id] = node
    return str(node.node_id)


def drain(node: str) -> None:
    deadline_ms = int(time.time() * 1000) + 600_000
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    is_accepted, why = ray._raylet.GcsClient(address=cluster.address).drain_node(node, reason, "spot", deadline_ms)
    assert is_accepted, why


def requested() -> int:
    """How many bundles the autoscaler was asked for: by its first version's way, or by its second's."""
    client = ray._raylet.GcsClient(address=cluster.address)
    old = json.loads(client.internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, None) or "[]")
    new = get_cluster_resource_state(client).cluster_resource_constraints
    return int(len(old) + sum(each.count for one in new for each in one.resource_requests))


def metrics() -> str:
    """What Ray tells Prometheus."""
    with urllib.request.urlopen(f"http://{head}:{METRICS_PORT}/metrics") as answer:
        return str(answer.read().decode())


add(head, int(cpus))
print(json.dumps({"address": cluster.address}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    answer: dict[str, Any] = {}
    if asked["do"] == "add":
        answer["node"] = add(addresses.pop(0), asked["cpus"], asked["cloud"])
    elif asked["do"] == "kill":
        cluster.remove_node(nodes.pop(asked["node"]), allow_graceful=False)
    elif asked["do"] == "drain":
        drain(asked["node"])
    elif asked["do"] == "take away":
        clouds[asked["node"]].take_away()
    elif asked["do"] == "metrics":
        answer["metrics"] = metrics()
    else:
        answer["requested"] = requested()
    print(json.dumps(answer), flush=True)
