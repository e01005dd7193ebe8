"""The names that a shell completes: policies, strategies, loggers and run folders."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from unisono.launch.ending.result import RUNS
from unisono.named import brought

VARIABLE = "_UNISONO_COMPLETE"
"""Set while a shell asks what a word may become."""


def words_typed(environ: Mapping[str, str]) -> list[str]:
    """The words behind ``unisono`` that a shell wants completed, so that only their command is loaded."""
    return (environ.get("_TYPER_COMPLETE_ARGS") or environ.get("COMP_WORDS", "")).split()[1:]


def policies(incomplete: str) -> list[str]:
    """Policies by name."""
    from unisono.adapt.named import NAMED

    return _beginning([*NAMED, *brought("policy")], incomplete)


def strategies(incomplete: str) -> list[str]:
    """Strategies by name."""
    from unisono.sync.named import STRATEGIES

    return _beginning([*STRATEGIES, *brought("strategy")], incomplete)


def loggers(incomplete: str) -> list[str]:
    """Loggers by name."""
    from unisono.loggers.named import NAMED

    return _beginning([*NAMED, *brought("logger")], incomplete)


def run_folders(incomplete: str) -> list[str]:
    """The run folders below ``runs``, and below the folder that is being typed; else folders, to go on in them."""
    typed = Path(incomplete) if incomplete.endswith(os.sep) else Path(incomplete).parent
    found = [str(path) for folder in (RUNS, typed) for path in _folders(folder) if _is_run(path)]
    return _beginning(found, incomplete) or _beginning([f"{path}{os.sep}" for path in _folders(typed)], incomplete)


def _folders(parent: Path) -> Iterator[Path]:
    yield from sorted(path for path in parent.glob("*") if path.is_dir())


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("job.json", "journal.jsonl"))


def _beginning(names: list[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
