"""``unisono k8s`` and ``unisono slurm``: write the manifests or the script with which a cluster trains."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import TRAINING, Module, Offered, RestartOptions, ScriptName, grouped, opt, read_workers
from unisono.errors import JobError
from unisono.launch import k8s_manifests, slurm_job
from unisono.launch.elastic.elastic_settings import Range
from unisono.launch.k8s_job import (
    GRACE_S,
    RESTARTS,
    ClusterJob,
    Pods,
    Spot,
    label_of,
    read_selector,
    read_toleration,
    read_variables,
)
from unisono.launch.k8s_manifests import for_kubeflow, job_set, new_secret
from unisono.launch.outcome import RUNS
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.slurm_job import REQUEUES, Allocation, BatchJob, read_nodes, split_words
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
        """The pods that these options describe.

        Raises:
            JobError: a selector or a toleration cannot be read.
        """
        pods = Pods(
            self.gpus,
            self.workers_per_pod,
            self.cpu,
            self.memory,
            self.shm,
            dict(read_selector(text) for text in self.node_selector or ()),
            tuple(read_toleration(text) for text in self.toleration or ()),
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
        list[str] | None, typer.Argument(help="The arguments of the script, after --.", metavar="-- ARGS")
    ] = None,
    *,
    own: JobSetOptions,
    pod: PodOptions,
    objects: ObjectOptions,
    options: LongerGrace,
    restarts: RestartOptions,
) -> None:
    """Write the manifests of a job on Kubernetes.

    For example: unisono k8s train.py --image I -n 2:8 --gpus 1 -- --its-own flags. They are a JobSet of a coordinator
    and of pods whose workers join it. kubectl apply starts it.
    """
    launched = Script(script, tuple(args or ()), is_module=own.module)
    launch = LaunchSettings.tuned(launched, options, workers=0)
    name = label_of(launch.script.stem) if objects.name is None else objects.name
    job = ClusterJob(
        restarts.elastic(launch, Range.read(own.workers)),
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
    job.check()
    words = shlex.join(["unisono", *sys.argv[1:]])
    text = k8s_manifests.text_of([*for_kubeflow(job)] if objects.kubeflow else [job_set(job)], words)
    if objects.output is not None and objects.output == objects.new_secret:
        raise JobError(f"--output and --new-secret {objects.output}: keys go into a file of their own")
    if objects.output is not None:
        k8s_manifests.write(text, objects.output)
        typer.echo(f"written: {objects.output}", err=True)
    if objects.new_secret is not None:
        keys = k8s_manifests.text_of([new_secret(job.secret, job.namespace)], words)
        k8s_manifests.write(keys, objects.new_secret, secret=True)
        typer.echo(f"written: {objects.new_secret} (who can read it can take part in the job)", err=True)
    if objects.output is None:
        typer.echo(text, nl=False)


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """The options of a job of Slurm."""

    time: Annotated[str, opt(metavar="TIME")]
    """The time limit, as Slurm takes it: 00:30:00 or 1-12:00:00."""
    nodes: Annotated[str, opt(metavar="N|N-M")] = "1"
    """The number of nodes; from N to M, as many as are free at each start."""
    gpus: Annotated[int, opt()] = 0
    """The number of GPUs of each node; each GPU gets one worker."""
    workers_per_node: Annotated[int | None, opt()] = None
    """Without GPUs: the number of workers on each node."""
    cores: Annotated[int | None, opt("--cores-per-gpu", "--cores-per-worker")] = None
    """CPU cores for each worker; by default as many as the cluster gives."""
    account: Annotated[str | None, opt()] = None
    """The account to charge."""
    partition: Annotated[str | None, opt()] = None
    """The partition to run in."""
    job_name: Annotated[str | None, opt()] = None
    """The name of the job; by default the script's."""
    load: Annotated[list[str] | None, opt("--module")] = None
    """Load this environment module (module load) before training; repeat for more. A Python module is named with -m."""
    more: Annotated[list[str] | None, opt("--sbatch", metavar="NAME=VALUE")] = None
    """Another option of sbatch; repeat for more."""
    workers: Annotated[str | None, opt(metavar="N,N,…")] = None
    """Write a job array, with one element for each of these numbers of workers."""
    is_module: Annotated[bool, opt("-m")] = False
    """SCRIPT is the name of a Python module."""
    python: Annotated[str, opt()] = sys.executable
    """The Python interpreter; by default the one that runs this command."""
    runs: Annotated[Path, opt(metavar="FOLDER")] = RUNS
    """The folder in which run folders are made."""
    requeues: Annotated[int, opt()] = REQUEUES
    """The number of times that a preempted job is started again."""
    output: Annotated[Path | None, opt("-o", "--output", metavar="FILE")] = None
    """Write the script into this file, not to the terminal."""
    send: Annotated[bool, opt("--submit")] = False
    """Submit the script with sbatch."""


@grouped
def slurm(
    script: ScriptName,
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ARGS", help="The arguments of the script, after --; or the word study, and its options."
        ),
    ] = None,
    *,
    own: SlurmOptions,
    options: Annotated[Settings, Offered(("checkpoints.every", "arithmetic.numerics"))],
) -> None:
    """Write the script of a Slurm job that trains.

    For example: unisono slurm train.py --time 00:30:00 --gpus 4 -- --its-own flags. The Slurm job starts one worker for
    each GPU, asks them for a checkpoint before the time is over or when the job has to make room, and goes on from
    there when Slurm starts it again.
    """
    study, words = split_words(args or ())
    target = Script(script, () if study else words, is_module=own.is_module)
    target.require_readable()
    least, most = read_nodes(own.nodes)
    job = BatchJob(
        script=target,
        allocation=Allocation(
            own.time,
            most,
            own.gpus,
            own.workers_per_node,
            own.cores,
            own.account,
            own.partition,
            tuple(own.more or ()),
            least_nodes=least,
        ),
        name=target.stem if own.job_name is None else own.job_name,
        folder=_here(),
        python=own.python,
        workers=() if own.workers is None else read_workers(own.workers),
        study_words=words if study else None,
        modules=tuple(own.load or ()),
        runs=own.runs,
        requeues=own.requeues,
        options=options,
    )
    text = slurm_job.text_of(job, ["unisono", *sys.argv[1:]])
    slurm_job.require_valid(text)
    if own.output is not None:
        slurm_job.write(text, own.output)
        typer.echo(f"written: {own.output}")
    if own.send:
        typer.echo(slurm_job.submit(text, own.output))
    elif own.output is None:
        sys.stdout.buffer.write(os.fsencode(text))


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise JobError(f"the working folder is gone: {error}") from error
