"""The options that several commands have in common, each declared once."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from unisono.cli.completion import loggers, policies, run_folders, strategies
from unisono.cli.help import HelpfulCommand
from unisono.errors import JobError
from unisono.launch.elastic.address import Control, Whereabouts
from unisono.launch.elastic.elastic import MAX_RESTARTS
from unisono.launch.settings import GRACE_S, LaunchSettings, Script
from unisono.launch.tuning import Tuning
from unisono.received import short

SCRIPT: Any = {"context_settings": {"allow_interspersed_args": False}, "cls": HelpfulCommand}
"""A command's settings: what stands after the script is the script's, -n and --help too."""

# Commands that are given a URL before anything else: those that reach a job on another host.

SCHEMES = ("http://", "https://")


class RemoteCommand(HelpfulCommand):
    """A command whose first word may be the coordinator's URL, though options follow it."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The URL comes first."""
        return ["[URL]", *super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the URL for an option, so that it ends none of the others."""
        if args and args[0].lower().startswith(SCHEMES):
            args = ["--url", *args]
        return super().parse_args(ctx, args)


Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Of a coordinator on another host; comes first.", hidden=True)
]
TokenFile = Annotated[
    Path | None, typer.Option(help="With URL: a copy of the file 'token' of the job's run folder.", show_default=False)
]
Wait = Annotated[
    float,
    typer.Option("--wait-s", help="With URL: seconds to wait for a coordinator that does not answer yet.", min=0),
]
Trusted = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        help="With URL: a copy of its 'certificate.pem', or of the certificate authority's.",
        show_default=False,
    ),
]


def named_folder(text: str) -> Path:
    """A run folder that somebody has named. No name (a variable that is not set, say) would be the working folder.

    Raises:
        BadParameter: the name is empty.
    """
    if not text:
        raise typer.BadParameter("the name is empty: name a folder (the working folder is .), or leave the option out")
    return Path(text)


# Groups of options, besides those that a help shows first.
BITS = "What decides the bits"
FAILURES = "Failures"
SPEED = "Speed"
RECORDS = "Records"
CLUSTERS = "Clusters and devices"
SEVERAL_HOSTS = "Several hosts"

Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")]
RunDir = Annotated[
    Path | None,
    typer.Option(
        parser=named_folder,
        metavar="FOLDER",
        envvar="UNISONO_RUN_DIR",
        autocompletion=run_folders,
        help="The run folder; if it has checkpoints of this job, the job resumes from the newest.",
    ),
]
RunningIn = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        parser=named_folder,
        metavar="FOLDER",
        autocompletion=run_folders,
        help="The job's run folder; needed if several elastic jobs run.",
    ),
]
Shards = Annotated[
    int | None,
    typer.Option(
        envvar="UNISONO_SHARDS",
        rich_help_panel=BITS,
        help="The number of shards of the global batch, unless the script sets it.",
    ),
]
DevicesPerWorker = Annotated[
    int | None,
    typer.Option(
        envvar="UNISONO_DEVICES_PER_WORKER",
        rich_help_panel=CLUSTERS,
        help="The devices of each worker, each with a process, unless the script sets them: for too large models.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        envvar="UNISONO_THREADS", rich_help_panel=BITS, help="torch threads per worker, unless the script sets them."
    ),
]
Tuned = Annotated[
    bool,
    typer.Option(
        "--tuning/--no-tuning",
        envvar="UNISONO_TUNING",
        rich_help_panel=SPEED,
        help="Have the workers' memory allocator keep freed memory, which is faster; unisono run --dry-run shows how.",
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        rich_help_panel=FAILURES,
        help="Seconds that workers get to write a checkpoint and leave after the first Ctrl-C or SIGTERM.",
    ),
]
Pin = Annotated[
    bool | None,
    typer.Option(
        "--pin/--no-pin",
        envvar="UNISONO_PIN",
        rich_help_panel=SPEED,
        help="Pin workers to cores of their own; by default to NUMA nodes, if the host has several. It decides no bit.",
        show_default=False,
    ),
]
Notices = Annotated[
    Literal["aws", "gcp", "azure", "auto"] | None,
    typer.Option(
        rich_help_panel=FAILURES,
        help="Leave in time when the cloud says that it takes this machine away; auto finds out which cloud.",
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(envvar="UNISONO_CHECKPOINT_EVERY", help="Steps between checkpoints, unless the script sets them."),
]
AllowJobChange = Annotated[
    bool,
    typer.Option(
        "--allow-job-change",
        envvar="UNISONO_ALLOW_JOB_CHANGE",
        rich_help_panel=BITS,
        help="Resume although settings differ from the checkpoint's.",
    ),
]
InsecureData = Annotated[
    bool,
    typer.Option(
        "--insecure-data",
        envvar="UNISONO_INSECURE_DATA",
        rich_help_panel=SEVERAL_HOSTS,
        help="Let workers of several hosts speak plain text with each other: in a network that only they are in.",
    ),
]
TimelineKept = Annotated[
    bool,
    typer.Option(
        "--timeline",
        envvar="UNISONO_TIMELINE",
        rich_help_panel=RECORDS,
        help="Write down what each worker does when, for unisono timeline.",
    ),
]
ProfiledSteps = Annotated[
    str | None,
    typer.Option(
        "--profile",
        envvar="UNISONO_PROFILE",
        metavar="FIRST:LAST",
        rich_help_panel=RECORDS,
        help="Run torch's profiler in these steps: 10:12 for the steps 10 and 11; unisono timeline shows its events.",
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        help=f"Elastic: replacements of lost workers, per worker on average; {MAX_RESTARTS} for A:B.",
        show_default=False,
    ),
]
AuditShare = Annotated[
    float | None,
    typer.Option(
        "--audit",
        envvar="UNISONO_AUDIT",
        min=0,
        max=1,
        rich_help_panel=FAILURES,
        help="The share of shards that another worker computes again, to find a processor with wrong results.",
    ),
]
Numerics = Annotated[
    Literal["native", "portable"] | None,
    typer.Option(
        envvar="UNISONO_NUMERICS",
        rich_help_panel=BITS,
        help="portable: the same bits on x86 processors of several makers and generations, at a price.",
        show_default=False,
    ),
]
StrategyName = Annotated[
    str | None,
    typer.Option(
        autocompletion=strategies,
        help="How workers synchronise: all-reduce, parameter-server, model-averaging, pair-averaging, local-sgd or "
        "diloco; settings after a colon: local-sgd:every=16.",
    ),
]
PolicyNames = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        autocompletion=policies,
        help="A policy that adapts the training: noise-scale, ada-scale, goodput, scaling, straggler, topology, "
        "batch-size-schedule, edge-of-stability or module:Class; repeat for more.",
    ),
]
LogTo = Annotated[
    str | None,
    typer.Option(
        "--log-to",
        metavar="NAME,…",
        autocompletion=loggers,
        help="Where the figures of each step go, besides metrics.jsonl: tensorboard, csv, mlflow, wandb, module:Class.",
    ),
]
WorkerRange = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--workers",
        metavar="N|A:B",
        help="The number of workers; A:B for an elastic job with A to B workers. By default 1; with --hosts, as many "
        "as they have room for.",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the command and environment of each worker, and start none.")
]
ScriptName = Annotated[str, typer.Argument(help="The script to train with; a module's name with -m.", metavar="SCRIPT")]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(help="The arguments of the script: everything after it.", metavar="ARGS")
]
FaultScript = Annotated[
    Path | None,
    typer.Option(
        "--faults",
        rich_help_panel=FAILURES,
        help="A fault plan (TOML): faults to inject into the job, to test how it recovers.",
    ),
]
RestartOnError = Annotated[
    bool,
    typer.Option(
        "--restart-on-error",
        rich_help_panel=FAILURES,
        help="Elastic: replace a worker also after an exception in its script.",
    ),
]
WithPage = Annotated[
    bool, typer.Option("--page", help="Show the job in a browser, too: prints a link; the same as unisono page later.")
]
FailureTimeout = Annotated[
    float,
    typer.Option(rich_help_panel=FAILURES, help="Elastic: seconds of silence after which a worker counts as lost."),
]
WarmStart = Annotated[
    bool,
    typer.Option(
        "--warm-start/--no-warm-start",
        rich_help_panel=SPEED,
        help="Start faster: load torch once, and fork workers from that process (Linux).",
    ),
]
ListenAt = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        rich_help_panel=SEVERAL_HOSTS,
        metavar="HOST:PORT",
        help="Elastic: the address for other hosts, over TLS; :PORT for all addresses, port 0 for any free one.",
    ),
]
Here = Annotated[
    int | None,
    typer.Option(
        "--here",
        min=0,
        rich_help_panel=SEVERAL_HOSTS,
        help="Elastic: the largest number of workers on this host; 0 for none.",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=SEVERAL_HOSTS,
        help="With --coordinator: its TLS certificate, PEM. By default one is made for the job.",
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(rich_help_panel=SEVERAL_HOSTS, help="With --coordinator: the certificate's private key, PEM."),
]
MadeToken = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        rich_help_panel=SEVERAL_HOSTS,
        help="With --coordinator: a file with the job's token, made beforehand. By default each start makes one.",
    ),
]
KnownAs = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=SEVERAL_HOSTS,
        metavar="NAME",
        help="With --coordinator: the name by which other hosts know this one, if it is another.",
    ),
]

Engine = Annotated[
    Literal["ray"] | None,
    typer.Option(
        "--on",
        rich_help_panel=CLUSTERS,
        help="Train on the nodes of a cluster: ray (found as ray.init does, by RAY_ADDRESS, say).",
    ),
]
Resources = Annotated[
    str | None,
    typer.Option(
        "--resources-per-worker",
        metavar="NAME=N,…",
        rich_help_panel=CLUSTERS,
        help="With --on ray: the resources of each worker, CPU=4,GPU=1; by default a core for each of its threads.",
    ),
]

# The options that commands have in common, as one parameter of each.


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has an option for each field of the data classes among its parameters."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(command)
    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            own = [each.name for each in fields(group) if each.name in given]
            given[name] = group(**{each: given.pop(each) for each in own})
        command(**given)

    found = list[Parameter]()
    for name, one in signature(command).parameters.items():
        own = [one.replace(annotation=hints[name])]
        found += signature(groups[name], eval_str=True).parameters.values() if name in groups else own
    in_order = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in found]
    expanded.__signature__ = Signature(in_order)  # type: ignore[attr-defined]  # typer reads it
    return expanded


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of commands that start workers of a script."""

    module: Module = False
    shards: Shards = None
    threads: Threads = None
    tuned: Tuned = True

    def settings(self, script: str, args: Sequence[str] | None, **more: Any) -> LaunchSettings:
        """The settings with which the workers start, with those that are not among these options."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        is_module, tuned, policies = own.pop("module"), own.pop("tuned"), own.pop("policy", None)
        log_to = own.pop("log_to", None)
        return LaunchSettings(
            Script(script, tuple(args or ()), is_module=is_module),
            tuning=Tuning.of_this_process(wanted=tuned, devices=more.get("devices_per_worker") or 1),
            policies=tuple(policies or ()),
            log_to=tuple(filter(None, map(str.strip, (log_to or "").split(",")))),
            **own,
            **more,
        )


@dataclass(frozen=True, slots=True)
class JobOptions(WorkerOptions):
    """The options of commands whose workers train a job."""

    checkpoint_every: CheckpointEvery = None
    allow_job_change: AllowJobChange = False
    insecure_data: InsecureData = False
    policy: PolicyNames = None
    numerics: Numerics = None
    strategy: StrategyName = None
    log_to: LogTo = None
    audit: AuditShare = None
    timeline: TimelineKept = False
    profile: ProfiledSteps = None
    grace_s: Grace = GRACE_S
    notices: Notices = None
    warm_start: WarmStart = True
    pin: Pin = None


@dataclass(frozen=True, slots=True)
class JobPlace:
    """The options of commands that ask something of a job that runs."""

    run_dir: RunningIn = None
    url: Url = None
    token_file: TokenFile = None
    certificate: Trusted = None

    @property
    def control(self) -> Control:
        """The connection to the job's coordinator."""
        return Control(Whereabouts(self.url, self.token_file, self.certificate, self.run_dir).address())


def read_workers(text: str, option: str = "--workers") -> tuple[int, ...]:
    """The numbers in ``1,2,4``, the value of an option.

    Raises:
        JobError: one is no number.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if not re.fullmatch(r"[0-9]{1,6}", word)), None)
    if wrong is not None:
        raise JobError(
            f"{option} {short(text)}: {short(wrong)} is no number of {option.strip('-').partition('-')[0]}; write them "
            f"as in {option} 1,2,4"
        )
    return tuple(map(int, words))
