"""The pods of a job: what each runs, and what it sees of keys, run folder and shared memory."""

from collections.abc import Sequence
from typing import Any

from unisono.launch.elastic.coordinator_process import devices_words, job_words
from unisono.launch.k8s.cluster_job import ClusterJob
from unisono.launch.k8s.secret import CERTIFICATE, KEY, TOKEN

COORDINATOR = "coordinator"
NODE = "node"
"""What runs workers; Kubeflow Trainer looks for a container of this name."""

PORT = 7777
KEYS = "/unisono/keys"
RUNS = "/unisono/runs"

COORDINATOR_ROOM = {"cpu": "250m", "memory": "1Gi"}
"""It has no torch, and sees no gradient."""

GPU = "nvidia.com/gpu"

WAIT_S = 300
"""How long an agent waits for its coordinator: a name takes a while until all name servers know it."""

LEFT_OVER_S = 15
"""For the end of a pod's processes, after the workers' own time."""

Manifest = dict[str, Any]


def escaped(words: Sequence[str]) -> list[str]:
    """Words as Kubernetes leaves them alone: it takes ``$(NAME)`` for a variable, and ``$$`` for ``$``."""
    return [word.replace("$", "$$") for word in words]


def coordinator_pod(job: ClusterJob, name: str) -> Manifest:
    """The pod of the coordinator.

    Args:
        job: the job.
        name: the name of the JobSet, or a reference to a variable with it.
    """
    settings = job.settings
    words = [
        *("unisono", "run", "-n", str(settings.workers), "--here", "0", "--max-restarts", str(settings.max_restarts)),
        *(
            "--coordinator",
            f":{PORT}",
            "--known-as",
            _host(name),
            "--run-dir",
            f"{RUNS}/{name}",
            "--token-file",
            f"{KEYS}/{TOKEN}",
        ),
        *("--tls-cert", f"{KEYS}/{CERTIFICATE}", "--tls-key", f"{KEYS}/{KEY}"),
        *(["--restart-on-error"] if settings.restart_on_error else []),
        *devices_words(job.settings.launch),
        *escaped(job_words(settings)),
    ]
    container = {
        "name": COORDINATOR,
        **_container(job, words, (TOKEN, CERTIFICATE, KEY)),
        "ports": [{"name": COORDINATOR, "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
        "resources": {"requests": COORDINATOR_ROOM, "limits": {"memory": COORDINATOR_ROOM["memory"]}},
    }
    metadata = {"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}}
    return {"metadata": metadata, "spec": _pod(job, container, (TOKEN, CERTIFICATE, KEY))}


def worker_pod(job: ClusterJob, name: str) -> Manifest:
    """A pod of workers. Arguments as of :func:`coordinator_pod`."""
    pods, seen = job.pods, (TOKEN, CERTIFICATE)
    url = f"https://{_host(name)}:{PORT}"
    words = [
        *("unisono", "join", url, "-n", str(job.workers_per_pod), "--wait-s", str(WAIT_S)),
        *("--agent", f"{NODE}-$(JOB_COMPLETION_INDEX)"),  # so the next pod of this index says that the last one is lost
        *("--token-file", f"{KEYS}/{TOKEN}", "--certificate", f"{KEYS}/{CERTIFICATE}"),
        *("--run-dir", f"{RUNS}/{name}"),
        *devices_words(job.settings.launch),
        *escaped(job_words(job.settings)),
    ]
    container = {"name": NODE, **_container(job, words, seen), "resources": _resources(job)}
    memory = {"medium": "Memory", **({"sizeLimit": pods.shared_memory} if pods.shared_memory else {})}
    container["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})  # noqa: S108 (where torch looks)
    tolerations = [toleration.manifest for toleration in pods.tolerations]
    if pods.gpus:
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    spec = _pod(job, container, seen)
    spec["volumes"].append({"name": "shared-memory", "emptyDir": memory})
    placed = {"nodeSelector": dict(pods.selector), "tolerations": tolerations}
    return {"spec": spec | {key: value for key, value in placed.items() if value}}


def _host(name: str) -> str:
    """The name under which name servers know the coordinator's pod, whatever its address."""
    return f"{name}-{COORDINATOR}-0-0.{name}"


def _container(job: ClusterJob, words: list[str], seen: Sequence[str]) -> Manifest:
    mounts = [
        # Each by itself: what a folder of a Secret shows are links, and a token behind a link is refused.
        {"name": "keys", "mountPath": f"{KEYS}/{file}", "subPath": file, "readOnly": True}
        for file in seen
    ]
    privileges: Manifest = {"allowPrivilegeEscalation": False}
    if job.user is not None:
        privileges["capabilities"] = {"drop": ["ALL"]}
    return {
        "image": job.image,
        "command": words,
        **(
            {"env": [{"name": each, "value": escaped([value])[0]} for each, value in job.variables.items()]}
            if job.variables
            else {}
        ),
        "securityContext": privileges,
        "volumeMounts": [*mounts, {"name": "runs", "mountPath": RUNS}],
    }


def _pod(job: ClusterJob, container: Manifest, seen: Sequence[str]) -> Manifest:
    user = {} if job.user is None else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), job.user)
    keys = {"secretName": job.secret, "defaultMode": 0o400, "items": [{"key": file, "path": file} for file in seen]}
    runs = {"emptyDir": {}} if job.claim is None else {"persistentVolumeClaim": {"claimName": job.claim}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.settings.launch.options.launch.grace_s) + LEFT_OVER_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            **({"runAsNonRoot": True} if user else {}),
            **user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "keys", "secret": keys}, {"name": "runs", **runs}],
    }


def _resources(job: ClusterJob) -> Manifest:
    memory = {} if job.pods.memory is None else {"memory": job.pods.memory}
    gpus = {GPU: str(job.pods.gpus)} if job.pods.gpus else {}
    limits = {**memory, **gpus}
    return {"requests": {"cpu": job.cores, **memory, **gpus}, **({"limits": limits} if limits else {})}
