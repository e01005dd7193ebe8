"""A job for Kubernetes, from the options of the command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Literal

from unisono.errors import JobError
from unisono.launch.elastic.elastic_settings import ElasticSettings
from unisono.launch.settings import MOST_WORKERS
from unisono.received import short

LONGEST_NAME = 40
"""The length of a JobSet's name: its pods are ``NAME-coordinator-0-0-abcde``, and a host name has 63 characters."""

LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
KEY = re.compile(rf"((?=[^/]{{1,253}}/){SUBDOMAIN.pattern}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_HOST = (
    r"([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9A-Fa-f:]+\])(:[0-9]+)?"
)
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
IMAGE = re.compile(
    rf"({_HOST}/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@[A-Za-z][\w.+-]*:[0-9A-Fa-f]{{32,}})?", re.ASCII
)
"""Registry, path, tag and digest, as kubelets read them: with any other text no pod ever starts."""

LARGEST_COUNT = 2**31 - 1
"""The largest number of restarts: the APIs count in 32 bits."""

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
UNITS = {"": Decimal(1), "m": Decimal("0.001")}
UNITS |= {unit: Decimal(1000) ** n for n, unit in enumerate("kMGTPE", 1)}
UNITS |= {f"{unit}i": Decimal(1024) ** n for n, unit in enumerate("KMGTPE", 1)}
LEAST_MEMORY = 2**20


OBJECT_NAME = SUBDOMAIN, 253, "no name of an object of Kubernetes: lower-case letters, digits, dashes and dots"
DASHES = "lower-case letters, digits and dashes,"
NAMES = {
    "--image": (IMAGE, 512, "no name of an image, such as registry.example/me/train:1"),
    "--name": (LABEL, LONGEST_NAME, f"write a DNS label: up to 40 {DASHES} a letter first, and no dash at the end"),
    "--namespace": (NAMESPACE, 63, f"write a DNS label: up to 63 {DASHES} and no dash at either end"),
    "--secret": OBJECT_NAME,
    "--claim": OBJECT_NAME,
}
"""The pattern of a name, the largest number of its characters, and the advice for a wrong one, by option."""


def require_name(option: str, text: str) -> None:
    """Refuse a name that Kubernetes would refuse.

    Raises:
        JobError: the name is wrong; says what a name is made of.
    """
    pattern, longest, advice = NAMES[option]
    if not pattern.fullmatch(text) or len(text) > longest:
        raise JobError(f"{option} {short(text)}: {advice}")


def label_of(text: str) -> str:
    """The DNS label that is nearest to a name: ``train-digits`` for ``train_digits``."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:LONGEST_NAME].strip("-")
    return label or "train"


def read_quantity(option: str, text: str) -> Decimal:
    """A quantity as Kubernetes reads it, in cores or bytes.

    Raises:
        JobError: it is none, or nothing; quotes it.
    """
    parts = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([A-Za-z]*)", text)
    if parts is None or parts[2] not in UNITS:
        hint = ""
        if parts is not None and (unit := re.fullmatch(r"([kKmMgGtT])i?[bB]", parts[2])):
            hint = f": {parts[1]}{unit[1].upper()}i, say"
        raise JobError(f"{option} {short(text)}: write a number, with a unit of Kubernetes (Mi, Gi, M, G; m){hint}")
    amount = Decimal(parts[1]) * UNITS[parts[2]]
    if not amount:
        raise JobError(f"{option} {text}: more than nothing is needed")
    return amount


def require_cores(option: str, text: str) -> None:
    """Refuse a text that is no number of cores, such as ``4`` or ``500m``.

    Raises:
        JobError: it is none, or a number of bytes.
    """
    read_quantity(option, text)
    if not re.fullmatch(r"[0-9.]+|[0-9]+m", text):
        raise JobError(f"{option} {text}: cores are written as 4, 0.5 or 500m")


def require_memory(option: str, text: str) -> None:
    """Refuse a text that is no size of a memory, such as ``16Gi``.

    Raises:
        JobError: it is none, or so small that the unit must be missing or wrong.
    """
    if (amount := read_quantity(option, text)) < LEAST_MEMORY:
        raise JobError(f"{option} {text}: that is {amount:f} bytes; write a unit, as in 16Gi or 512Mi")


def read_selector(text: str) -> tuple[str, str]:
    """The key and value of a label of nodes, ``KEY=VALUE``.

    Raises:
        JobError: it is none.
    """
    key, equals, value = text.partition("=")
    if not equals or not KEY.fullmatch(key) or not VALUE.fullmatch(value):
        raise JobError(f"--node-selector {short(text)}: write KEY=VALUE, a label that nodes have")
    return key, value


Toleration = Mapping[str, str]
"""A taint of nodes that a pod tolerates, in the form of its manifest."""


def read_toleration(text: str) -> Toleration:
    """The toleration of a taint, ``KEY`` or ``KEY=VALUE``, maybe followed by ``:EFFECT``, as in ``kubectl taint``.

    Raises:
        JobError: it is none.
    """
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if not KEY.fullmatch(key) or not VALUE.fullmatch(value) or (colon and effect not in EFFECTS):
        raise JobError(
            f"--toleration {short(text)}: write KEY, KEY=VALUE or KEY=VALUE:EFFECT; effects: {', '.join(EFFECTS)}"
        )
    values = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **values, **({"effect": effect} if effect else {})}


def read_variables(texts: Sequence[str]) -> dict[str, str]:
    """Environment variables, each ``NAME=VALUE``.

    Raises:
        JobError: one is none; names it, and never its value, which may be a secret.
    """
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise JobError(f"--env {short(name)}: write NAME=VALUE")
        variables[name] = value
    return variables


RESTARTS = 100
"""How often a job may be started again because the pod of its coordinator was lost."""

GRACE_S = 120.0
"""How long workers may take to leave: a checkpoint on a network's storage takes longer than on a disk."""

LARGEST_USER = 2**31 - 1

MOST_PODS = 100_000
"""The largest number of pods of an Indexed Job."""

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
        memory: the memory of each pod, as a quantity of Kubernetes; None for no request.
        shared_memory: the largest size of /dev/shm; None for as much as the pod may use.
    """

    gpus: int = 0
    workers: int | None = None
    cores: str | None = None
    memory: str | None = None
    shared_memory: str | None = None
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()

    def on_spot(self, market: Spot) -> "Pods":
        """These pods on nodes that may be taken away."""
        key, value = SPOT[market]
        return replace(
            self,
            selector={**self.selector, key: value},
            tolerations=(*self.tolerations, read_toleration(f"{key}={value}:NoSchedule")),
        )

    def check(self) -> None:
        """Refuse options that contradict each other, or are out of range.

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
            require_cores("--cpu", self.cores)
        for option, text in (("--memory", self.memory), ("--shm", self.shared_memory)):
            if text is not None:
                require_memory(option, text)


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job for Kubernetes.

    Attributes:
        settings: the settings of the job; its script is in the image.
        secret: the name of the Secret with token, certificate and key.
        namespace: the namespace; None for the one that kubectl is set to.
        claim: the name of a PersistentVolumeClaim for run folders; None for folders that end with their pods.
        restarts: the number of times that the whole job may be started again.
        user: the number of the user that runs in the pods; None for the image's.
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
        """Refuse a job that can work on no cluster.

        Raises:
            JobError: says which option, and why.
        """
        self.settings.check(is_here=False)
        self.pods.check()
        names = {"--image": self.image, "--name": self.name, "--secret": self.secret}
        for option, text in (names | {"--claim": self.claim, "--namespace": self.namespace}).items():
            if text is not None:
                require_name(option, text)
        if not 0 <= self.restarts <= LARGEST_COUNT:
            raise JobError(f"--restarts {self.restarts}: at least 0, and at most {LARGEST_COUNT}")
        if self.pod_count > MOST_PODS:
            raise JobError(
                f"--workers {self.settings.workers}: that takes {self.pod_count} pods, and a Job of Kubernetes has at "
                f"most {MOST_PODS}: more workers in each pod take fewer"
            )
        if self.settings.max_restarts * self.pod_count > LARGEST_COUNT:
            raise JobError(
                f"--max-restarts {self.settings.max_restarts}: at most {LARGEST_COUNT // self.pod_count} for "
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
