"""The JobSet of a job: a coordinator, nodes that run workers, and what becomes of the job when their pods end.

How it looks is in ``manifests.yaml``, and here what stands there for a value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.errors import FIRST_SIGNAL, PREEMPTED, USAGE
from unisono.launch.elastic.coordinator_process import devices_words, job_words
from unisono.launch.k8s.cluster_job import ClusterJob
from unisono.launch.k8s.manifests import Manifest, filled

SIGNALS = (6, 7, 8, 9, 11, 15)
"""With which a coordinator may end for no fault of the script's: its memory ran out, say."""

GPU = "nvidia.com/gpu"

LEFT_OVER_S = 15
"""For the end of a pod's processes, after the workers' own time."""


def job_set(job: ClusterJob) -> Manifest:
    """The manifest."""
    return filled("JobSet", values_of(job))


def escaped(words: Sequence[str]) -> list[str]:
    """Words as Kubernetes leaves them alone: it takes ``$(NAME)`` for a variable, and ``$$`` for ``$``."""
    return [word.replace("$", "$$") for word in words]


def values_of(job: ClusterJob, reference: str | None = None) -> dict[str, Any]:
    """What the manifests of a job need; None for what they leave out.

    Args:
        job: the job.
        reference: a reference to a variable of the pods with the name of the JobSet; None for the job's name.
    """
    settings, name = job.settings, reference or job.name
    # The name under which name servers know the coordinator's pod, whatever its address.
    host = f"{name}-coordinator-0-0.{name}"
    has_user = None if job.user is None else True
    return {
        "name": job.name,
        "namespace": job.namespace,
        "restarts": job.restarts,
        "goes_on": sorted([PREEMPTED, *(FIRST_SIGNAL + number for number in SIGNALS)]),
        "preempted": PREEMPTED,
        "usage": USAGE,
        "grace_s": int(settings.launch.options.launch.grace_s) + LEFT_OVER_S,
        "has_user": has_user,
        "user": job.user,
        "capabilities": has_user and {"drop": ["ALL"]},
        "image": job.image,
        "env": [{"name": each, "value": escaped([value])[0]} for each, value in job.variables.items()] or None,
        "secret": job.secret,
        "no_claim": {} if job.claim is None else None,
        "claim": None if job.claim is None else {"claimName": job.claim},
        "workers": str(settings.workers),
        "max_restarts": str(settings.max_restarts),
        "restart_on_error": "--restart-on-error" if settings.restart_on_error else None,
        "job_words": [*devices_words(settings.launch), *escaped(job_words(settings))],
        "host": host,
        "url": f"https://{host}:7777",
        "run_dir": f"/unisono/runs/{name}",
        **_of_nodes(job),
    }


def _of_nodes(job: ClusterJob) -> Mapping[str, Any]:
    pods = job.pods
    memory = {} if pods.memory is None else {"memory": pods.memory}
    gpus = {GPU: str(pods.gpus)} if pods.gpus else {}
    for_gpus = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}] if gpus else []
    return {
        "pods": job.pod_count,
        "pod_restarts": job.settings.max_restarts * job.pod_count,
        "workers_per_pod": str(job.workers_per_pod),
        "node_metadata": None,
        "requests": {"cpu": job.cores, **memory, **gpus},
        "limits": {**memory, **gpus} or None,
        "shared_memory": pods.shared_memory,
        "node_selector": dict(pods.selector) or None,
        "tolerations": [*(toleration.manifest for toleration in pods.tolerations), *for_gpus] or None,
    }
