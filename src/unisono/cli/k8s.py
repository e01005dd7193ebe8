"""``unisono k8s``: write the manifests of a job for Kubernetes."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import TRAINING, Module, Offered, RestartOptions, grouped, opt
from unisono.errors import JobError
from unisono.launch.elastic.elastic import Range
from unisono.launch.k8s.cluster_job import GRACE_S, RESTARTS, ClusterJob, Pods, Spot
from unisono.launch.k8s.job_set import job_set
from unisono.launch.k8s.manifests import text_of, write
from unisono.launch.k8s.secret import new_secret
from unisono.launch.k8s.training_runtime import train_job, training_runtime
from unisono.launch.k8s.words import Toleration, label_of, read_selector, read_variables
from unisono.launch.settings import LaunchSettings, Script
from unisono.settings.table import Settings

WORKERS = "Pods of workers"
OBJECTS = "What is written"


@dataclass(frozen=True, slots=True)
class PodOptions:
    """The options of the pods of workers."""

    gpus: Annotated[int, opt(panel=WORKERS)] = 0
    """The number of GPUs of each pod; each GPU gets one worker."""
    workers_per_pod: Annotated[int | None, opt(panel=WORKERS)] = None
    """Without GPUs: the number of workers in each pod; 1."""
    cpu: Annotated[str | None, opt(panel=WORKERS, metavar="QUANTITY")] = None
    """The cores of each pod: 4, 500m; by default one for each thread of its workers."""
    memory: Annotated[str | None, opt(panel=WORKERS, metavar="QUANTITY")] = None
    """The memory of each pod: 16Gi."""
    shm: Annotated[str | None, opt(panel=WORKERS, metavar="QUANTITY")] = None
    """The largest size of /dev/shm, which counts as memory of the pod: 4Gi."""
    spot: Annotated[Spot | None, opt(panel=WORKERS)] = None
    """Run workers on nodes that may be taken away, of this provider."""
    node_selector: Annotated[list[str] | None, opt(panel=WORKERS, metavar="KEY=VALUE")] = None
    """A label that nodes have; repeat for more."""
    toleration: Annotated[list[str] | None, opt(panel=WORKERS, metavar="KEY=VALUE:EFFECT")] = None
    """A taint that nodes may have; repeat for more."""

    @property
    def pods(self) -> Pods:
        """What they say.

        Raises:
            JobError: a selector or a toleration is none.
        """
        pods = Pods(
            self.gpus,
            self.workers_per_pod,
            self.cpu,
            self.memory,
            self.shm,
            dict(read_selector(text) for text in self.node_selector or ()),
            tuple(Toleration.read(text) for text in self.toleration or ()),
        )
        return pods if self.spot is None else pods.on_spot(self.spot)


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """The options of the objects that are written."""

    name: Annotated[str | None, opt(panel=OBJECTS)] = None
    """The name of the JobSet; by default the script's."""
    namespace: Annotated[str | None, opt(panel=OBJECTS)] = None
    """The namespace."""
    secret: Annotated[str | None, opt(panel=OBJECTS)] = None
    """The Secret with token, certificate and key; by default NAME-keys."""
    claim: Annotated[str | None, opt(panel=OBJECTS)] = None
    """A PersistentVolumeClaim for the run folder, which all pods mount (ReadWriteMany)."""
    new_secret: Annotated[Path | None, opt(panel=OBJECTS, metavar="FILE")] = None
    """Make new keys, and write their Secret into this new file."""
    kubeflow: Annotated[bool, opt(panel=OBJECTS)] = False
    """Write a TrainingRuntime and a TrainJob, for Kubeflow Trainer."""
    output: Annotated[Path | None, opt("-o", "--output", panel=OBJECTS, metavar="FILE")] = None
    """Write into this file, not to the terminal."""


LongerGrace = Annotated[Settings, Offered(TRAINING, {"launch.grace_s": GRACE_S})]
"""The options of a training with more time to leave: storage of a network is slow."""


@dataclass(frozen=True, slots=True)
class JobSetOptions:
    """The options of the job as the cluster knows it."""

    image: Annotated[str, opt()]
    """The image, with the script, Unisono and openssl."""
    workers: Annotated[str, opt("-n", "--workers", metavar="N|A:B")] = "1"
    """The number of workers; from A to B of them. By default 1."""
    module: Module = False
    restarts: Annotated[int, opt()] = RESTARTS
    """The number of times that the whole job may be started again."""
    user: Annotated[int | None, opt(metavar="UID")] = None
    """The number of the user that runs in the pods."""
    env: Annotated[list[str] | None, opt(metavar="NAME=VALUE")] = None
    """An environment variable of all pods; repeat for more."""


@grouped
def k8s(
    script: Annotated[
        str, typer.Argument(help="The script to train with, in the image; a module's name with -m.", metavar="SCRIPT")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(help="After --: the arguments of the script.", metavar="ARGS")
    ] = None,
    *,
    own: JobSetOptions,
    pod: PodOptions,
    objects: ObjectOptions,
    options: LongerGrace,
    restarts: RestartOptions,
) -> None:
    """Write manifests for Kubernetes: unisono k8s train.py --image I -n 2:8 --gpus 1 -- --its-own flags.

    A JobSet of a coordinator and of pods whose workers join it. kubectl apply starts it.
    """
    launched = Script(script, tuple(args or ()), is_module=own.module)
    launch = LaunchSettings.tuned(launched, options, workers=0)
    settings = restarts.elastic(launch, Range.read(own.workers))
    name = label_of(launch.script.stem) if objects.name is None else objects.name
    wanted = ClusterJob(
        settings,
        own.image,
        name,
        f"{name}-keys" if objects.secret is None else objects.secret,
        pod.pods,
        objects.namespace,
        objects.claim,
        own.restarts,
        own.user,
        read_variables(own.env or ()),
    )
    wanted.check()
    _write(wanted, objects)


def _write(job: ClusterJob, objects: ObjectOptions) -> None:
    words = shlex.join(["unisono", *sys.argv[1:]])
    manifests = [training_runtime(job), train_job(job)] if objects.kubeflow else [job_set(job)]
    text = text_of(manifests, words)
    if objects.output is not None and objects.output == objects.new_secret:
        raise JobError(f"--output and --new-secret {objects.output}: keys go into a file of their own")
    if objects.output is not None:
        write(text, objects.output)
        typer.echo(f"written: {objects.output}", err=True)
    if objects.new_secret is not None:
        write(text_of([new_secret(job.secret, job.namespace)], words), objects.new_secret, secret=True)
        typer.echo(f"written: {objects.new_secret} (who can read it can take part in the job)", err=True)
    if objects.output is None:
        typer.echo(text, nl=False)
