"""``unisono k8s``: write the manifests of a job for Kubernetes."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import (
    TRAINING,
    FailureTimeout,
    MaxRestarts,
    Module,
    Offered,
    RestartOnError,
    grouped,
)
from unisono.errors import JobError
from unisono.launch.elastic.elastic import FAILURE_TIMEOUT_S, MAX_RESTARTS, ElasticSettings, Range
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

    gpus: Annotated[
        int, typer.Option(rich_help_panel=WORKERS, help="The number of GPUs of each pod; each GPU gets one worker.")
    ] = 0
    workers_per_pod: Annotated[
        int | None, typer.Option(rich_help_panel=WORKERS, help="Without GPUs: the number of workers in each pod; 1.")
    ] = None
    cpu: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=WORKERS,
            metavar="QUANTITY",
            help="The cores of each pod: 4, 500m; by default one for each thread of its workers.",
        ),
    ] = None
    memory: Annotated[
        str | None, typer.Option(rich_help_panel=WORKERS, metavar="QUANTITY", help="The memory of each pod: 16Gi.")
    ] = None
    shm: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=WORKERS,
            metavar="QUANTITY",
            help="The largest size of /dev/shm, which counts as memory of the pod: 4Gi.",
        ),
    ] = None
    spot: Annotated[
        Spot | None,
        typer.Option(rich_help_panel=WORKERS, help="Run workers on nodes that may be taken away, of this provider."),
    ] = None
    node_selector: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=WORKERS, metavar="KEY=VALUE", help="A label that nodes have; repeat for more."),
    ] = None
    toleration: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=WORKERS, metavar="KEY=VALUE:EFFECT", help="A taint that nodes may have; repeat for more."
        ),
    ] = None

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

    name: Annotated[
        str | None, typer.Option(rich_help_panel=OBJECTS, help="The name of the JobSet; by default the script's.")
    ] = None
    namespace: Annotated[str | None, typer.Option(rich_help_panel=OBJECTS, help="The namespace.")] = None
    secret: Annotated[
        str | None,
        typer.Option(rich_help_panel=OBJECTS, help="The Secret with token, certificate and key; by default NAME-keys."),
    ] = None
    claim: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=OBJECTS,
            help="A PersistentVolumeClaim for the run folder, which all pods mount (ReadWriteMany).",
        ),
    ] = None
    new_secret: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=OBJECTS, metavar="FILE", help="Make new keys, and write their Secret into this new file."
        ),
    ] = None
    kubeflow: Annotated[
        bool,
        typer.Option(
            "--kubeflow", rich_help_panel=OBJECTS, help="Write a TrainingRuntime and a TrainJob, for Kubeflow Trainer."
        ),
    ] = False
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", rich_help_panel=OBJECTS, metavar="FILE", help="Write into this file, not to the terminal."
        ),
    ] = None


LongerGrace = Annotated[Settings, Offered(TRAINING, {"launch.grace_s": GRACE_S})]
"""The options of a training with more time to leave: storage of a network is slow."""


@grouped
def k8s(
    script: Annotated[
        str, typer.Argument(help="The script to train with, in the image; a module's name with -m.", metavar="SCRIPT")
    ],
    image: Annotated[str, typer.Option(help="The image, with the script, Unisono and openssl.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="After --: the arguments of the script.", metavar="ARGS")
    ] = None,
    workers: Annotated[
        str, typer.Option("-n", "--workers", metavar="N|A:B", help="The number of workers; from A to B of them.")
    ] = "1",
    *,
    pod: PodOptions,
    objects: ObjectOptions,
    module: Module = False,
    options: LongerGrace,
    max_restarts: MaxRestarts = None,
    restart_on_error: RestartOnError = False,
    failure_timeout_s: FailureTimeout = FAILURE_TIMEOUT_S,
    restarts: Annotated[
        int, typer.Option(help="The number of times that the whole job may be started again.")
    ] = RESTARTS,
    user: Annotated[
        int | None, typer.Option(metavar="UID", help="The number of the user that runs in the pods.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An environment variable of all pods; repeat for more."),
    ] = None,
) -> None:
    """Write manifests for Kubernetes: unisono k8s train.py --image I -n 2:8 --gpus 1 -- --its-own flags.

    A JobSet of a coordinator and of pods whose workers join it. kubectl apply starts it.
    """
    launch = LaunchSettings.tuned(Script(script, tuple(args or ()), is_module=module), options, workers=0)
    settings = ElasticSettings(
        launch,
        Range.read(workers),
        max_restarts=MAX_RESTARTS if max_restarts is None else max_restarts,
        restart_on_error=restart_on_error,
        failure_timeout_s=failure_timeout_s,
    )
    name = label_of(launch.script.stem) if objects.name is None else objects.name
    wanted = ClusterJob(
        settings,
        image,
        name,
        f"{name}-keys" if objects.secret is None else objects.secret,
        pod.pods,
        objects.namespace,
        objects.claim,
        restarts,
        user,
        read_variables(env or ()),
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
