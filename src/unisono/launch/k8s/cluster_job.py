"""A job for Kubernetes: what a person asks for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from unisono.errors import JobError
from unisono.launch.elastic.elastic import ElasticSettings
from unisono.launch.k8s import words
from unisono.launch.settings import MOST_WORKERS

RESTARTS = 100
"""How often a job may be started again because the pod of its coordinator was lost."""

GRACE_S = 120.0
"""How long workers may take to leave: a checkpoint on a network's storage takes longer than on a disk."""

LARGEST_USER = 2**31 - 1

MOST_PODS = 100_000
"""Of an Indexed Job."""

Spot = Literal["aks", "eks", "gke", "karpenter"]

SPOT: Mapping[Spot, tuple[str, str]] = {
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
    "gke": ("cloud.google.com/gke-spot", "true"),
    "karpenter": ("karpenter.sh/capacity-type", "spot"),
}
"""The label, and where there is one the taint, of nodes that are cheap and may be taken away at any time."""


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of workers.

    Attributes:
        gpus: the number of GPUs of each pod; 0 for workers on CPUs.
        workers: the number of workers of each pod on CPUs; None with GPUs.
        cores: the cores of each pod, as a quantity of Kubernetes; None for one for each thread of its workers.
        memory: the memory of each pod, likewise; None for no request.
        shared_memory: the largest size of /dev/shm; None for as much as the pod may use.
        selector: the labels of the nodes on which they may run.
        tolerations: the taints of nodes that they do not mind.
    """

    gpus: int = 0
    workers: int | None = None
    cores: str | None = None
    memory: str | None = None
    shared_memory: str | None = None
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[words.Toleration, ...] = ()

    def on_spot(self, market: Spot) -> "Pods":
        """The same on nodes that may be taken away."""
        key, value = SPOT[market]
        return replace(
            self,
            selector={**self.selector, key: value},
            tolerations=(*self.tolerations, words.Toleration(key, value, "NoSchedule")),
        )

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            JobError: says which option, and why.
        """
        if not 0 <= self.gpus <= MOST_WORKERS:
            raise JobError(f"--gpus {self.gpus}: a number from 0 to {MOST_WORKERS}")
        if self.workers is not None and not 1 <= self.workers <= MOST_WORKERS:
            raise JobError(f"--workers-per-pod {self.workers}: a number from 1 to {MOST_WORKERS}")
        if self.gpus and self.workers is not None:
            raise JobError(
                f"--gpus {self.gpus} with --workers-per-pod {self.workers}: GPUs and --devices-per-worker say how many"
            )
        if self.cores is not None:
            words.require_cores("--cpu", self.cores)
        for option, text in (("--memory", self.memory), ("--shm", self.shared_memory)):
            if text is not None:
                words.require_memory(option, text)


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job for Kubernetes.

    Attributes:
        settings: the settings of the job; its script is in the image.
        image: the image of all pods.
        name: the name of the JobSet.
        secret: the name of the Secret with token, certificate and key.
        pods: the pods of workers.
        namespace: the namespace; None for the one that kubectl is set to.
        claim: the name of a PersistentVolumeClaim for run folders; None for folders that end with their pods.
        restarts: the number of times that the whole job may be started again.
        user: the number of the user that runs in the pods; None for the image's.
        variables: environment variables for all pods.
    """

    settings: ElasticSettings
    image: str
    name: str
    secret: str
    pods: Pods = field(default_factory=Pods)
    namespace: str | None = None
    claim: str | None = None
    restarts: int = RESTARTS
    user: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """The number of devices of each worker."""
        return self.settings.launch.devices

    @property
    def workers_per_pod(self) -> int:
        """The number of workers for which a pod has room."""
        return self.pods.gpus // self.devices if self.pods.gpus else self.pods.workers or 1

    @property
    def pod_count(self) -> int:
        """The number of pods that the largest number of workers takes."""
        return -(-self.settings.workers.largest // self.workers_per_pod)

    @property
    def cores(self) -> str:
        """The cores of each pod of workers, as a quantity of Kubernetes."""
        return self.pods.cores or str(self.workers_per_pod * self.devices * self.settings.launch.threads)

    def check(self) -> None:
        """Refuse what cannot work on any cluster.

        Raises:
            JobError: says which option, and why.
        """
        self.settings.check(is_here=False)
        self.pods.check()
        named = {"--image": self.image, "--name": self.name, "--secret": self.secret}
        for option, text in (named | {"--claim": self.claim, "--namespace": self.namespace}).items():
            if text is not None:
                words.require_name(option, text)
        if not 0 <= self.restarts <= words.LARGEST_COUNT:
            raise JobError(f"--restarts {self.restarts}: at least 0, and at most {words.LARGEST_COUNT}")
        if self.pod_count > MOST_PODS:
            raise JobError(
                f"--workers {self.settings.workers}: that takes {self.pod_count} pods, and a Job of Kubernetes has at "
                f"most {MOST_PODS}: more workers in each pod take fewer"
            )
        if self.settings.max_restarts * self.pod_count > words.LARGEST_COUNT:
            raise JobError(
                f"--max-restarts {self.settings.max_restarts}: at most {words.LARGEST_COUNT // self.pod_count} for "
                f"{self.pod_count} pods"
            )
        if self.user is not None and not 1 <= self.user <= LARGEST_USER:
            raise JobError(f"--user {self.user}: the number of a user that is not root, from 1")
        self._check_devices()

    def _check_devices(self) -> None:
        if self.pods.gpus % self.devices:
            raise JobError(
                f"--gpus {self.pods.gpus} with --devices-per-worker {self.devices}: the GPUs of a pod are no whole "
                "number of workers"
            )
        if self.workers_per_pod * self.devices > MOST_WORKERS:
            raise JobError(f"--workers-per-pod {self.workers_per_pod}: at most {MOST_WORKERS} devices in a pod")
        if self.pods.gpus and self.pod_count > 1 and not self.settings.launch.options.communication.insecure_data:
            raise JobError(
                f"--gpus {self.pods.gpus} in {self.pod_count} pods: NCCL, which GPUs of several pods speak, cannot "
                "encrypt. Say --insecure-data if nobody else is in the pods' network"
            )
