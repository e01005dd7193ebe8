"""Starts the nodes of a Ray cluster, and ends them, as lines of JSON ask for it; the first line says where it is."""

import json
import os
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

sys.path.append(str(Path(__file__).parents[2]))
from metadata_service import Metadata, metadata_service

METRICS_PORT = 9400
"""At which the head's node shows Ray's metrics."""

GCS_PORT = 6379

cpus, spare, head, *addresses = sys.argv[1:]
cluster = Cluster()
nodes: dict[str, Any] = {}
clouds: dict[str, Metadata] = {}
opened = ExitStack()


def add(address: str, count: int, cloud: str = "") -> str:
    more: dict[str, Any] = {}
    if not nodes:
        more = {"include_dashboard": False, "dashboard_host": head, "metrics_export_port": METRICS_PORT}
        more.update(autoscaler() if int(spare) else {})
    service = opened.enter_context(metadata_service(cloud)) if cloud else None
    if service is not None:
        more["env_vars"] = service.variables
    node = cluster.add_node(num_cpus=count, node_ip_address=address, **more)
    if service is not None:
        clouds[node.node_id] = service
    nodes[node.node_id] = node
    return str(node.node_id)


def autoscaler() -> dict[str, Any]:
    """What the head's node needs so that Ray's own autoscaler adds nodes of one core: raylets at its address.

    Ray's wheel lacks the defaults of its fake nodes, so they are asked for as a provider that Ray does not know.
    """
    os.environ.update(RAY_FAKE_CLUSTER="1", RAY_enable_autoscaler_v2="1", AUTOSCALER_UPDATE_INTERVAL_S="1")
    own = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID, "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
    kind = f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}"
    provider: dict[str, Any] = {
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    provider |= {"launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID, "gcs_address": f"{head}:{GCS_PORT}"}
    resources = {"CPU": 1, "object_store_memory": 150 * 2**20}
    config = {
        "cluster_name": "spare",
        "provider": {"type": "external", "module": kind, **provider},
        "max_workers": int(spare),
        "idle_timeout_minutes": 0.05,
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": int(cpus)}, "node_config": {}, "max_workers": 0},
            "spare": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": int(spare)},
        },
        **{f"{name}_commands": [] for name in ("initialization", "setup", "head_setup", "worker_setup")},
        **{f"{name}_start_ray_commands": [] for name in ("head", "worker")},
        "cluster_synced_files": [],
        "file_mounts": {},
    }
    path = Path(os.environ["RAY_TMPDIR"], "autoscaler.json")
    path.write_text(json.dumps(config))
    return {"autoscaling_config": str(path), "env_vars": own, "gcs_server_port": GCS_PORT}


def alive() -> int:
    """How many nodes there are."""
    return sum(node["Alive"] for node in cluster.global_state.node_table())


def drain(node: str) -> None:
    deadline_ms = int(time.time() * 1000) + 600_000
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    is_accepted, why = ray._raylet.GcsClient(address=cluster.address).drain_node(node, reason, "spot", deadline_ms)
    assert is_accepted, why


def requested() -> int:
    """For how many bundles that wait the autoscaler is to add nodes."""
    state = get_cluster_resource_state(ray._raylet.GcsClient(address=cluster.address))
    return sum(
        len(one.resource_requests) for group in state.pending_gang_resource_requests for one in group.bundle_selectors
    )


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
    elif asked["do"] == "alive":
        answer["alive"] = alive()
    else:
        answer["requested"] = requested()
    print(json.dumps(answer), flush=True)
