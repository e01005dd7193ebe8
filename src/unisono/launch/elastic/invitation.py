"""What a person types on another host to bring more workers."""

import shlex
from pathlib import Path

from unisono.launch.elastic.certificate import certificate_file
from unisono.launch.elastic.elastic import ElasticSettings
from unisono.membership.token import token_file


def invitation(settings: ElasticSettings, run_dir: Path, url: str) -> list[str]:
    """Lines to show. The token is in a file: a command line is read by everybody on its host.

    Args:
        settings: of the job.
        run_dir: the run folder.
        url: of the coordinator.

    Returns:
        nothing, if no other host can reach the coordinator.
    """
    if settings.entrance.is_local:
        return []
    files = {"token": token_file(run_dir), "certificate": certificate_file(run_dir)}
    copied = " and ".join(str(path) for path in files.values())
    words = ["unisono", "join", url, "-n", str(_room(settings))]
    words += ["--token-file", files["token"].name, "--certificate", files["certificate"].name]
    return [
        f"another host joins with copies of {copied}, made with scp -p (who has the token takes part):",
        f"  {shlex.join([*words, *_wishes(settings), *settings.launch.script.argv])}",
    ]


def _room(settings: ElasticSettings) -> int:
    return max(1, settings.workers.largest - settings.launch.workers)


def _wishes(settings: ElasticSettings) -> list[str]:
    """Settings that all workers of a job need to have in common, as far as they were given to the launcher."""
    launch = settings.launch
    given = {
        "--shards": launch.shards,
        "--threads": launch.threads,
        "--checkpoint-every": launch.checkpoint_every,
        "--strategy": launch.strategy,
        "--audit": launch.audit,
    }
    wishes = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return [
        *wishes,
        *(word for name in launch.policies for word in ("--policy", name)),
        *(["--allow-job-change"] if launch.allow_job_change else []),
        *(["--failure-timeout-s", f"{settings.failure_timeout_s:g}"] if not settings.has_default_timeout else []),
    ]
