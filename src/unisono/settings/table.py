"""The table: each setting of a run with its type, its default, its range, its option, its variable and its meaning."""

import os
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from unisono.received import LONGEST_S
from unisono.settings.groups import Group, Row, group

# Groups of options in the help of commands, besides those that it shows first.
BITS = "What decides the bits"
FAILURES = "Failures"
SPEED = "Speed"
RECORDS = "Records"
CLUSTERS = "Clusters and devices"
SEVERAL_HOSTS = "Several hosts"

MOST = 2**63 - 1
SHORTEST_S = 1e-6
"""The shortest time that a setting may give, in seconds: a microsecond."""


@group("")
class BatchSettings(Group):
    """What a job trains on."""

    batch_size: Annotated[int | None, Row(least=1, most=MOST)] = None
    """The number of samples in one global batch, of all workers together."""
    shards: Annotated[
        int | None, Row("UNISONO_SHARDS", "--shards", BITS, least=1, most=MOST, page="run.md#choosing-shards")
    ] = None
    """The number of slices of the global batch, and the most workers that the job can use; by default it follows from
    the batch.
    """
    seed: Annotated[int, Row(least=-(2**63), most=MOST)] = 0
    """The seed of every random stream."""


@group("arithmetic.")
class Arithmetic(Group):
    """How workers compute. All of it may decide bits, and is written to ``job.json``."""

    threads: Annotated[int, Row("UNISONO_THREADS", "--threads", BITS, least=1, most=2**16)] = 1
    """The number of torch threads per worker."""
    reduction: Annotated[Literal["exact", "native"], Row()] = "exact"
    """``native``: the backend's own all-reduce, with its own order of additions, so not exact."""
    precision: Annotated[Literal["float32", "bf16", "fp16"], Row(page="gpus.md#float16")] = "float32"
    """``bf16`` and ``fp16`` run forward passes under autocast; ``fp16`` scales losses, and skips steps that overflow.
    """
    compression: Annotated[Literal["none", "bf16"], Row(page="run.md#making-it-fast")] = "none"
    """``bf16``: gradients are sent as bfloat16, half the bytes, rounded at every node of the summation tree, so that
    the bits still do not depend on the number of workers.
    """
    bucket_mb: Annotated[float | None, Row(least=1e-6, most=2**16)] = None
    """The size in MiB of a bucket, a buffer of several gradients that workers add up as one; the first has 1 at most.
    By default 4 on CPUs, and 25 on accelerators.
    """
    deterministic: Annotated[bool, Row()] = True
    """Whether to refuse operations that have no deterministic version."""
    numerics: Annotated[
        Literal["native", "portable"],
        Row("UNISONO_NUMERICS", "--numerics", BITS, page="hosts.md#hosts-of-different-kinds"),
    ] = "native"
    """``portable``: the same bits on x86 processors of several makers and generations, at a price."""
    on_nan: Annotated[Literal["stop", "skip"], Row()] = "stop"
    """The reaction to a loss or gradient that is NaN or infinite: ``stop`` the job, or ``skip`` the step, which updates
    nothing and returns NaN.
    """


@group("checkpoints.")
class Checkpoints(Group):
    """When checkpoints are written, and which stay."""

    every: Annotated[int | None, Row("UNISONO_CHECKPOINT_EVERY", "--checkpoint-every", least=1)] = None
    """The number of steps between automatic checkpoints; by default none are written."""
    keep: Annotated[int, Row(least=1)] = 3
    """The number of newest checkpoints that stay."""
    allow_job_change: Annotated[bool, Row("UNISONO_ALLOW_JOB_CHANGE", "--allow-job-change", BITS)] = False
    """Resume although settings differ from the checkpoint's."""


@group("faults.")
class Faults(Group):
    """How workers find out what went wrong. They decide no bit."""

    timeout_s: Annotated[float, Row(least=SHORTEST_S, most=LONGEST_S)] = 300.0
    """The seconds for which a worker may be silent, or make no progress while others wait for it, until it is given up.
    """
    verify_every: Annotated[int, Row("UNISONO_VERIFY_EVERY", least=0)] = 100
    """The number of steps between comparisons of all workers' whole state, of which a copy is kept to go back to; in
    every step they compare their weights and buffers. With 0 they compare nothing, and keep no state.
    """
    checks: Annotated[Literal["some", "all", "none"], Row("UNISONO_CHECKS")] = "some"
    """The part of the gradients' memory that is checked in each step, from where a gradient is taken to the update:
    ``all``; ``some``, which is all of up to 8 MiB, and as much of larger ones, each part in turn; ``none``.
    """
    audit: Annotated[
        float,
        Row(
            "UNISONO_AUDIT", "--audit", FAILURES, least=0, most=1, page="failures.md#a-processor-that-computes-wrongly"
        ),
    ] = 0.0
    """The share of the work that another worker computes again, to find a processor with wrong results."""


@group("communication.")
class Communication(Group):
    """How workers exchange gradients. It decides no bit."""

    transport: Annotated[
        Literal["auto", "shared_memory", "hierarchical", "sockets", "process_group", "nccl"],
        Row("UNISONO_TRANSPORT", page="gpus.md"),
    ] = "auto"
    """The transport of gradients. By default ``shared_memory`` between workers of one host on CPUs, ``hierarchical``
    between such hosts, ``sockets`` between others, and on GPUs ``process_group``, which is torch's (NCCL, or Gloo);
    ``nccl`` wants NCCL, and ``sockets`` goes through the hosts' memory on GPUs, too.
    """
    topology: Annotated[Literal["auto", "direct", "ring", "tree", "star"], Row("UNISONO_TOPOLOGY")] = "auto"
    """The way of the partial sums between hosts; ``auto`` measures them when the workers have met."""
    insecure_data: Annotated[
        bool, Row("UNISONO_INSECURE_DATA", "--insecure-data", SEVERAL_HOSTS, page="hosts.md#who-can-listen")
    ] = False
    """Let workers of several hosts exchange data without encryption, in a network that only the job's hosts use; by
    default they use TLS 1.3.
    """
    overlap: Annotated[bool | None, Row("UNISONO_OVERLAP")] = None
    """Whether to reduce while the backward pass is under way. By default where that saves time: not over shared memory
    when the workers' threads keep all cores busy.
    """
    devices_per_worker: Annotated[
        int, Row("UNISONO_DEVICES_PER_WORKER", "--devices-per-worker", CLUSTERS, least=1, page="parallelism.md")
    ] = 1
    """The number of devices of a worker, each with a process, for models that do not fit one device."""
    balance: Annotated[Literal["even", "speed"], Row()] = "even"
    """``speed``: slower workers of an elastic job get fewer shards."""


@group("records.")
class Records(Group):
    """What a run records. It decides no bit."""

    loggers: Annotated[Any, Row("UNISONO_LOG_TO", "--log-to", metavar="NAME,…", plain=tuple, page="logging.md")] = ()
    """The loggers that get the figures of each step, besides ``metrics.jsonl``: ``tensorboard``, ``csv``, ``mlflow``,
    ``wandb`` or ``module:Class``; in a script also objects of ``unisono.Logger``.
    """
    timeline: Annotated[bool, Row("UNISONO_TIMELINE", "--timeline", RECORDS, page="timeline.md")] = False
    """Record the activities of each worker over time, for ``unisono timeline``."""
    profile: Annotated[
        str | None, Row("UNISONO_PROFILE", "--profile", RECORDS, metavar="FIRST:LAST", page="timeline.md")
    ] = None
    """The steps in which torch's profiler runs: ``10:12`` for the steps 10 and 11; ``unisono timeline`` shows them."""
    monitor: Annotated[Any, Row("UNISONO_MONITOR_EVERY", plain=int, least=0)] = 0
    """The number of steps from one whose gradients' noise is measured to the next; 0 for none."""


@group("launch.")
class Launch(Group):
    """What only command lines set: how workers are started. It decides no bit."""

    grace_s: Annotated[float, Row("", "--grace-s", FAILURES, least=0, most=LONGEST_S)] = 30.0
    """The seconds that workers get to write a checkpoint and leave after the first Ctrl-C or SIGTERM."""
    notices: Annotated[Literal["aws", "gcp", "azure", "auto"] | None, Row("", "--notices", FAILURES)] = None
    """Leave in time when the cloud gives notice that it takes this machine away; ``auto`` finds out which cloud."""
    warm_start: Annotated[bool, Row("", "--warm-start/--no-warm-start", SPEED)] = True
    """Start faster: load torch once, and fork workers from that process (Linux)."""
    tuning: Annotated[bool, Row("UNISONO_TUNING", "--tuning/--no-tuning", SPEED)] = True
    """Have the workers' memory allocator keep freed memory, which is faster; ``unisono run --dry-run`` shows how."""
    pin: Annotated[bool | None, Row("UNISONO_PIN", "--pin/--no-pin", SPEED, page="run.md#pinning")] = None
    """Pin workers to cores of their own; by default to NUMA nodes, if the host has several. It decides no bit."""


@group("special.")
class Special(Group):
    """What only the environment sets: for commands that start an unchanged script, and for special cases."""

    batch_size: Annotated[int | None, Row("UNISONO_BATCH_SIZE", least=1)] = None
    """The global batch, instead of the script's: unlike the others it takes precedence over the argument, and
    ``journal.jsonl`` records it; ``unisono batch-size`` sets it.
    """
    batch_scale: Annotated[int, Row("UNISONO_BATCH_SCALE", least=1)] = 1
    """The factor on ``batch_size``, ``shards`` and the learning rate; ``unisono study`` sets it for weak scaling.
    """
    batch_scale_warmup: Annotated[int, Row("UNISONO_BATCH_SCALE_WARMUP", least=1)] = 100
    """The number of steps, counted with the script's own batch size, during which the learning rate grows to its
    multiple.
    """
    stop_after: Annotated[int | None, Row("UNISONO_STOP_AFTER", least=1)] = None
    """``run.steps`` yields no more steps once the job has so many; the script then goes on after its loop, and later
    loops have no steps. If the run writes checkpoints, the last one is of that moment, so that starting it again
    without the variable ends in the bits of an uncut run.
    """
    stop_after_epochs: Annotated[int | None, Row("UNISONO_STOP_AFTER_EPOCHS", least=1)] = None
    """``run.steps`` yields no more steps after so many passes over the loop's data set; a later loop over a larger data
    set goes on, and the rest of the earlier one is left out.
    """
    stage_schedule: Annotated[str, Row("UNISONO_STAGE_SCHEDULE")] = ""
    """The ``schedule`` of ``run.pipeline``, instead of the script's; it decides no bit. ``unisono study --stages`` sets
    it.
    """
    log_every_s: Annotated[float, Row("UNISONO_LOG_EVERY_S", least=SHORTEST_S, most=LONGEST_S)] = 1.0
    """The seconds between two deliveries of new figures to loggers."""
    plugins: Annotated[Sequence[str], Row("UNISONO_PLUGINS", plain=tuple)] = ()
    """``module:function``, several with commas: each is called with the run before the script gets it."""
    data_keys: Annotated[str | None, Row("UNISONO_DATA_KEYS")] = None
    """A file with the keys of the network between hosts, made by ``unisono keys``: for torchrun and srun on hosts that
    share no files.
    """
    samples: Annotated[bool, Row("UNISONO_SAMPLES")] = False
    """Each worker records which samples it used, in ``samples/`` of the run folder; ``unisono chaos`` sets it."""
    study: Annotated[bool, Row("UNISONO_STUDY")] = False
    """``metrics.jsonl`` has each worker's times in every step, ``result.json`` how fast gradients are added up, and the
    launcher's run folder takes precedence over the script's; ``unisono study`` sets it.
    """
    curvature: Annotated[str | None, Row("UNISONO_CURVATURE")] = None
    """A folder with a file that says what to measure; ``unisono curvature`` sets it."""
    trace: Annotated[str | None, Row("UNISONO_TRACE")] = None
    """A folder in which every rank writes digests as it trains; ``unisono verify`` sets it."""


@group("")
class Settings(BatchSettings):
    """All settings of a run."""

    device: Annotated[Any, Row()] = None
    """The device to compute on: a name, a number or a ``torch.device``. By default the GPU of the worker's local rank
    if there is one, else the CPU.
    """
    run_dir: Annotated[str | os.PathLike[str] | None, Row(page="checkpoints.md#the-run-folder")] = None
    """The run folder; one that holds checkpoints of the same job is resumed. By default a new one under ``runs/``."""
    strategy: Annotated[
        Any, Row("UNISONO_STRATEGY", "--strategy", plain=str, page="strategies.md#synchronisation-strategies")
    ] = None
    """The strategy by which workers synchronise: ``all-reduce``, ``parameter-server``, ``model-averaging``,
    ``pair-averaging``, ``local-sgd`` or ``diloco``, settings after a colon: ``local-sgd:every=16``. Only with
    all-reduce and the synchronous parameter server are the weights the same bits on any number of workers.
    """
    policies: Annotated[
        Any, Row("UNISONO_POLICIES", "--policy", metavar="NAME,…", plain=tuple, page="adapting.md#adapting")
    ] = ()
    """The policies, which watch the training, and change batch, learning rate and workers while it runs; by name
    ``noise-scale``, ``ada-scale``, ``goodput``, ``scaling``, ``straggler``, ``topology``, ``batch-size-schedule``,
    ``edge-of-stability`` or ``module:Class``.
    """
    strict: Annotated[bool, Row("UNISONO_STRICT", page="loop.md#state-that-nothing-keeps")] = False
    """Whether to end the job where others are warned of state that the run does not keep, and that decides the bits.
    """
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    faults: Faults = field(default_factory=Faults)
    communication: Communication = field(default_factory=Communication)
    records: Records = field(default_factory=Records)
    launch: Launch = field(default_factory=Launch)
    special: Special = field(default_factory=Special)


OF_LAUNCHERS = {
    "UNISONO_RUN_DIR": "the run folder; a second run of a script gets the folder `run-2` inside of it, and so on",
    "UNISONO_RANK": "the place of the worker's process among all of the launch",
    "UNISONO_WORLD_SIZE": "the number of these processes",
    "UNISONO_LOCAL_RANK": "its place on its host",
    "UNISONO_LOCAL_WORLD_SIZE": "the number of processes on its host",
    "UNISONO_COORDINATOR": "of elastic jobs: the URL of the coordinator",
    "UNISONO_TOKEN_FILE": "of elastic jobs: the file with the job's token",
    "UNISONO_CERTIFICATE": "of elastic jobs: the file with the certificate to trust",
    "UNISONO_WORKER": "of elastic jobs: the worker's id",
    "UNISONO_STORE": "the address where the workers meet",
    "UNISONO_STORE_FD": "on rank 0: the open socket of that address",
    "UNISONO_LAUNCHER_PID": "the launcher's process",
    "UNISONO_AGENT_PID": "of elastic jobs: the agent's process",
    "UNISONO_CORES": "the number of cores that pinned workers share",
    "UNISONO_TERM": "the number of this start of the job among all starts in the run folder",
    "UNISONO_TERMINAL": "the launcher's output is a terminal, which can show a progress bar",
    "UNISONO_FAILURE_TIMEOUT_S": "of elastic jobs: the seconds of silence after which a worker counts as lost",
    "UNISONO_FAULTS": "with `--faults`: the fault plan",
    "UNISONO_CHAOS": "set by `unisono chaos`: a mark by which it finds all processes of a job again",
}
"""The variables that launchers and commands set for workers, and that belong to no setting."""
