"""The options that several commands have in common, each declared once."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from unisono.cli.completion import loggers, policies, run_folders, strategies
from unisono.cli.help import HelpfulCommand
from unisono.errors import JobError
from unisono.launch.elastic.address import Control, Whereabouts
from unisono.launch.elastic.elastic import MAX_RESTARTS
from unisono.received import short
from unisono.settings.reading import TABLE, names_in, settings_by_path, text_of
from unisono.settings.rows import NamedRow
from unisono.settings.table import CLUSTERS, FAILURES, SEVERAL_HOSTS, Settings

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
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        help=f"Elastic: replacements of lost workers, per worker on average; {MAX_RESTARTS} for A:B.",
        show_default=False,
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
    bool,
    typer.Option(
        "--page/--no-page",
        show_default=False,
        help="Show the job in a browser, too: prints a link; the same as unisono page later.",
    ),
]
FailureTimeout = Annotated[
    float,
    typer.Option(rich_help_panel=FAILURES, help="Elastic: seconds of silence after which a worker counts as lost."),
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

# The options of settings, from their table.


@dataclass(frozen=True, slots=True)
class Offered:
    """The settings that a command has options for. It stands in the annotation of a parameter of type Settings.

    Attributes:
        paths: the paths of the settings.
        defaults: the defaults of the command, by path, where they are others than the table's.
    """

    paths: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Parameter]:
        """A parameter for each option, by a name that no other parameter has."""
        return [_parameter(TABLE[path], self.defaults.get(path)) for path in self.paths]

    def settings(self, given: dict[str, Any]) -> Settings:
        """The settings that options say; they are taken out of what is given.

        Raises:
            JobError: a number is out of range; names the option.
        """
        values = {}
        for setting in map(TABLE.__getitem__, self.paths):
            value = given.pop(_name(setting), None)
            if setting.plain is tuple:
                value = names_in(",".join(value or ()))
            values[setting.path] = value
        return settings_by_path(values)


WORKERS = ("shards", "arithmetic.threads", "launch.tuning")
"""The settings of commands that start workers of a script."""

TRAINING = tuple(path for path, setting in TABLE.items() if setting.row.option)
"""The settings of commands whose workers train a job: all that have an option."""

Training = Annotated[Settings, Offered(TRAINING)]
Starting = Annotated[Settings, Offered(WORKERS)]

COMPLETIONS = {"strategy": strategies, "policies": policies, "records.loggers": loggers}


def _name(setting: NamedRow) -> str:
    return setting.path.replace(".", "__")


def _parameter(setting: NamedRow, default: Any) -> Parameter:
    row, kind = setting.row, list[str] if setting.plain is tuple else setting.plain
    usual = setting.default if default is None else default
    is_plain = usual in (None, ()) or isinstance(usual, bool) or "efault" in setting.text
    usually = "" if is_plain else f"; by default {text_of(usual)}"
    option = typer.Option(
        row.option,
        envvar=row.variable or None,
        rich_help_panel=row.panel or None,
        metavar=row.metavar,
        autocompletion=COMPLETIONS.get(setting.path),
        show_default=False,
        help=f"{setting.text.removesuffix('.')}{usually}.".replace("`", ""),
    )
    # Without a default, so that what nobody says is left to the script.
    return Parameter(_name(setting), Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind | None, option])


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has an option for each field of the data classes, and each setting, among its parameters."""
    hints = get_type_hints(command, include_extras=True)
    offered = {name: hint.__metadata__[0] for name, hint in hints.items() if get_args(hint)[:1] == (Settings,)}
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(command)
    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            own = [each.name for each in fields(group) if each.name in given]
            given[name] = group(**{each: given.pop(each) for each in own})
        for name, offer in offered.items():
            given[name] = offer.settings(given)
        command(**given)

    found = list[Parameter]()
    for name, one in signature(command).parameters.items():
        if name in offered:
            found += offered[name].parameters
        elif name in groups:
            found += signature(groups[name], eval_str=True).parameters.values()
        else:
            found.append(one.replace(annotation=hints[name]))
    in_order = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in found]
    expanded.__signature__ = Signature(in_order)  # type: ignore[attr-defined]  # typer reads it
    return expanded


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
