"""The JobSet of a job: a coordinator, nodes that run workers, and what becomes of the job when their pods end."""

from typing import Any

from unisono.errors import FIRST_SIGNAL, PREEMPTED, USAGE
from unisono.launch.k8s.cluster_job import ClusterJob
from unisono.launch.k8s.pods import COORDINATOR, NODE, Manifest, coordinator_pod, worker_pod

SIGNALS = (6, 7, 8, 9, 11, 15)
"""With which a coordinator may end for no fault of the script's: its memory ran out, say."""

EVICTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
"""The node is taken away, drained, or given to somebody else."""


def job_set(job: ClusterJob) -> Manifest:
    """The manifest."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job, job.name),
        "spec": job_set_spec(job, job.name),
    }


def metadata(job: ClusterJob, name: str) -> Manifest:
    """The metadata of an object of the job."""
    where = {} if job.namespace is None else {"namespace": job.namespace}
    return {"name": name, **where, "labels": {"app.kubernetes.io/managed-by": "unisono"}}


def job_set_spec(job: ClusterJob, name: str) -> Manifest:
    """The specification.

    Args:
        job: the job.
        name: the name of the JobSet, or a reference to a variable of the pods with it.
    """
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [COORDINATOR]},
        "failurePolicy": _failure_policy(job),
        "replicatedJobs": [
            {"name": COORDINATOR, "replicas": 1, "template": {"spec": _coordinator(job, name)}},
            {
                "name": NODE,
                "replicas": 1,
                "dependsOn": [{"name": COORDINATOR, "status": "Ready"}],
                "template": {"spec": _nodes(job, name)},
            },
        ],
    }


def _failure_policy(job: ClusterJob) -> Manifest:
    """A job of which the coordinator is lost is started again as a whole; one that has failed is not."""
    return {
        "maxRestarts": job.restarts,
        "restartStrategy": "BlockingRecreate",  # no worker of the start before speaks with the next coordinator
        "rules": [
            {"name": "nodes_failed", "action": "FailJobSet", "targetReplicatedJobs": [NODE]},
            {
                "name": "training_failed",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "targetReplicatedJobs": [COORDINATOR],
            },
        ],
    }


def _coordinator(job: ClusterJob, name: str) -> Manifest:
    goes_on = sorted([PREEMPTED, *(FIRST_SIGNAL + number for number in SIGNALS)])
    rules = [
        {"action": "Count", "onPodConditions": EVICTED["onPodConditions"]},
        {"action": "FailJob", "onExitCodes": {"containerName": COORDINATOR, "operator": "NotIn", "values": goes_on}},
    ]
    return _indexed(1, 0, rules, coordinator_pod(job, name))


def _nodes(job: ClusterJob, name: str) -> Manifest:
    def ended(code: int, action: str) -> Manifest:
        return {"action": action, "onExitCodes": {"containerName": NODE, "operator": "In", "values": [code]}}

    rules: list[Any] = [EVICTED, ended(PREEMPTED, "Ignore"), ended(USAGE, "FailJob")]
    count = job.pod_count
    return _indexed(count, job.settings.max_restarts * count, rules, worker_pod(job, name))


def _indexed(count: int, backoff_limit: int, rules: list[Any], pod: Manifest) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": backoff_limit,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }
