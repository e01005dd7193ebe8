"""The options that several commands have in common, each declared once, and their completions in a shell."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from unisono.cli.display import HelpfulCommand
from unisono.errors import JobError
from unisono.launch.elastic.address import Control, Whereabouts
from unisono.launch.elastic.elastic_settings import FAILURE_TIMEOUT_S, MAX_RESTARTS, ElasticSettings, Range
from unisono.launch.outcome import RUNS
from unisono.launch.settings import LaunchSettings
from unisono.named import extensions
from unisono.received import imported, short
from unisono.settings.groups import NamedRow, meanings
from unisono.settings.reading import TABLE, names_in, settings_by_path, text_of
from unisono.settings.table import CLUSTERS, FAILURES, Settings

# Names that a shell completes.


def _beginning(names: list[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def _names_of(kind: str, ours: str) -> Callable[[str], list[str]]:
    """A function that completes names of a kind: our own, from a table (``module:NAMES``), and those of extensions."""

    def complete(incomplete: str) -> list[str]:
        return _beginning([*imported(ours, kind), *extensions(kind)], incomplete)

    return complete


def run_folders(incomplete: str) -> list[str]:
    """Run folders in ``runs`` and in the folder that is being typed; if there are none, the folders in the latter."""
    typed = Path(incomplete) if incomplete.endswith(os.sep) else Path(incomplete).parent
    runs = [str(path) for parent in (RUNS, typed) for path in _folders(parent) if _is_run(path)]
    return _beginning(runs, incomplete) or _beginning([f"{path}{os.sep}" for path in _folders(typed)], incomplete)


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("*") if path.is_dir())


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("job.json", "journal.jsonl"))


# Settings of commands and options.

SCRIPT: Any = {"context_settings": {"allow_interspersed_args": False}, "cls": HelpfulCommand}
"""The settings of commands with a script: all words after the script are the script's, -n and --help too."""

SCHEMES = ("http://", "https://")


class RemoteCommand(HelpfulCommand):
    """A command whose first word may be the coordinator's URL, though options follow it."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage, the URL first."""
        return ["[URL]", *super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Make an option of the URL, so that options may follow it."""
        if args and args[0].lower().startswith(SCHEMES):
            args = ["--url", *args]
        return super().parse_args(ctx, args)


def named_folder(text: str) -> Path:
    """The run folder of a name. An empty name is refused, since it would mean the working folder.

    Raises:
        BadParameter: the name is empty (of a variable that is not set, say).
    """
    if not text:
        raise typer.BadParameter("the name is empty: name a folder (the working folder is .), or leave the option out")
    return Path(text)


def opt(*names: str, panel: str = "", **details: Any) -> Any:
    """An option. In a data class, the sentences below its field are its help."""
    return typer.Option(*names, rich_help_panel=panel or None, show_default=False, **details)


FOLDER: Any = {"parser": named_folder, "metavar": "FOLDER", "autocompletion": run_folders}
"""The details of options that name run folders."""

Url = Annotated[
    str | None, opt("--url", metavar="URL", help="Of a coordinator on another host; comes first.", hidden=True)
]
TokenFile = Annotated[Path | None, opt(help="With URL: a copy of the file 'token' of the job's run folder.")]
Trusted = Annotated[
    Path | None,
    opt("--certificate", help="With URL: a copy of its 'certificate.pem', or of the certificate authority's."),
]
Module = Annotated[bool, opt("-m", "--module", help="SCRIPT is the name of a Python module, as for python -m.")]
FailureTimeout = Annotated[
    float, opt(panel=FAILURES, help="Elastic: seconds of silence after which a worker counts as lost; 300 by default.")
]
ScriptName = Annotated[str, typer.Argument(help="The script to train with; a module's name with -m.", metavar="SCRIPT")]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(help="The arguments of the script: everything after it.", metavar="ARGS")
]
Resources = Annotated[
    str | None,
    opt(
        "--resources-per-worker",
        metavar="NAME=N,…",
        panel=CLUSTERS,
        help="With --on ray: the resources of each worker, CPU=4,GPU=1; by default a core for each of its threads.",
    ),
]

# The options of settings, from their table.


@dataclass(frozen=True, slots=True)
class Offered:
    """The settings for which a command has options, in the annotation of its parameter of type Settings.

    Attributes:
        paths: the paths of the settings.
        defaults: the defaults of the command that differ from the table's, by path.
    """

    paths: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Parameter]:
        """A parameter for each option, with a name that no other parameter has."""
        return [_parameter(TABLE[path], self.defaults.get(path)) for path in self.paths]

    def settings(self, arguments: dict[str, Any]) -> Settings:
        """The settings of a command's arguments, which are removed from them.

        Raises:
            JobError: a number is out of range; names the option.
        """
        values = {}
        for setting in map(TABLE.__getitem__, self.paths):
            value = arguments.pop(_name(setting), None)
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

COMPLETIONS = {
    "strategy": _names_of("strategy", "unisono.sync:STRATEGIES"),
    "policies": _names_of("policy", "unisono.adapt.policy_names:NAMED"),
    "records.loggers": _names_of("logger", "unisono.loggers.by_name:NAMED"),
}


def _name(setting: NamedRow) -> str:
    return setting.path.replace(".", "__")


def _parameter(setting: NamedRow, default: Any) -> Parameter:
    row, kind = setting.row, list[str] if setting.plain is tuple else setting.plain
    option = typer.Option(
        row.option,
        envvar=row.variable or None,
        rich_help_panel=row.panel or None,
        metavar=row.metavar,
        autocompletion=COMPLETIONS.get(setting.path),
        show_default=False,
        help=_with_default(setting.text, setting.default if default is None else default),
    )
    # Without a default, so that an option that is not given is left to the script.
    return Parameter(_name(setting), Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind | None, option])


def _with_default(text: str, default: Any) -> str:
    """The sentences on an option, with its default if it has one and they do not name it."""
    is_complete = default in (None, (), "", Parameter.empty) or isinstance(default, bool) or "efault" in text
    return (text if is_complete else f"{text.removesuffix('.')}; by default {text_of(default)}.").replace("`", "")


def _parameters(group: Any) -> list[Parameter]:
    parameters = list(signature(group, eval_str=True).parameters.values())
    for parameter in parameters:
        texts = [meanings(kind.__module__).get((kind.__name__, parameter.name)) for kind in group.__mro__]
        for details in getattr(parameter.annotation, "__metadata__", ()):
            if parameter.default is False and details.default is ...:  # else typer would add an option --no-…
                details.param_decls = (f"--{parameter.name.replace('_', '-')}",)
            if details.help is None:
                details.help = _with_default(next(filter(None, texts), ""), parameter.default)
    return parameters


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for each field of the data classes, and for each setting, among its parameters."""
    hints = get_type_hints(command, include_extras=True)
    offers = {name: hint.__metadata__[0] for name, hint in hints.items() if get_args(hint)[:1] == (Settings,)}
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(command)
    def expanded(**arguments: Any) -> None:
        for name, group in groups.items():
            names = [field.name for field in fields(group) if field.name in arguments]
            arguments[name] = group(**{field: arguments.pop(field) for field in names})
        for name, offer in offers.items():
            arguments[name] = offer.settings(arguments)
        command(**arguments)

    parameters = list[Parameter]()
    for name, parameter in signature(command).parameters.items():
        if name in offers:
            parameters += offers[name].parameters
        elif name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))
    by_name = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    expanded.__signature__ = Signature(by_name)  # type: ignore[attr-defined]  # typer reads it
    return expanded


@dataclass(frozen=True, slots=True)
class RestartOptions:
    """The options of commands that start elastic jobs: what happens to workers that are lost."""

    max_restarts: Annotated[int | None, opt()] = None
    """Elastic: the number of lost workers that are replaced, for each worker of the largest number: with -n 2:8, 3
    allows 24 in the whole job. By default 3 for A:B.
    """
    restart_on_error: Annotated[bool, opt("--restart-on-error", panel=FAILURES)] = False
    """Elastic: replace a worker also after an exception in its script."""
    failure_timeout_s: FailureTimeout = FAILURE_TIMEOUT_S

    def elastic(self, launch: LaunchSettings, workers: Range, **more: Any) -> ElasticSettings:
        """The settings of a job with these numbers of workers."""
        return ElasticSettings(
            launch,
            workers,
            max_restarts=MAX_RESTARTS if self.max_restarts is None else self.max_restarts,
            restart_on_error=self.restart_on_error,
            failure_timeout_s=self.failure_timeout_s,
            **more,
        )


@dataclass(frozen=True, slots=True)
class JobPlace:
    """The options of commands that show or change a running job."""

    run_dir: Annotated[Path | None, opt("--run-dir", **FOLDER)] = None
    """The job's run folder; needed if several elastic jobs run."""
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
