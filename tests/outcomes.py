"""Jobs that run to their end, and what they come to: for tests that compare jobs."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commands import completed
from unisono_lab.faults.faults import Faults

PATIENCE_S = 150.0


def train(
    folder: Path, *options: str, script: Path, arguments: Sequence[str] = (), settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script, with options of ``unisono run`` and environment variables."""
    words = ("run", *options, "--run-dir", folder, script, *arguments)
    return completed(*words, env={**os.environ, **(settings or {})}, timeout=PATIENCE_S)


def struck_by(folder: Path, faults: Faults) -> tuple[str, str]:
    """The option with which a job is struck by these faults, for which a file is written beside its run folder."""
    script = folder.with_suffix(".toml")
    script.write_text(faults.to_toml())
    return "--faults", str(script)


def outcome(folder: Path, ended: subprocess.CompletedProcess[str]) -> tuple[str, list[Any]]:
    """The digest of the weights, and what was decided when."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return outcome_in(folder)


def outcome_in(folder: Path) -> tuple[str, list[Any]]:
    """The same of a job that is known to have ended well."""
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    decided = [line for line in journal if line["event"] == "decided"]
    digest = json.loads((folder / "result.json").read_text())["weights_sha256"]
    seen = {json.dumps([one["step"], one["policy"], one["verb"], one["value"], one["why"]]) for one in decided}
    return digest, sorted(map(json.loads, seen))  # a main worker that takes over may say again what the one before said
