"""The end of a job on Ray: the coordinator's word, and what agents end with after it. Nothing is asked of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from unisono.checkpoint.folder import RunFolder
from unisono.errors import Unreadable
from unisono.jsonl import read_lines
from unisono.launch.elastic.elastic import AgentEnd, conclusion_of, lines_about
from unisono.launch.ending.result import JobEnd, write_end
from unisono.launch.terminal.terminal import Terminal
from unisono.membership.messages import JobOver


def after_the_coordinator(
    run_dir: Path, code: int, why: str, agents: Sequence[AgentEnd], terminal: Terminal
) -> tuple[int, str]:
    """The exit code of a job, and why it ended so, when its agents have ended, too; ``result.json`` says the same then.

    Args:
        run_dir: the run folder.
        code: the exit code by the coordinator.
        why: the reason for it, if the coordinator has not said it.
        agents: the ends of all agents of the job.
        terminal: the terminal on which agents that are not missed are told.
    """
    over = _word_in(run_dir)
    if code or over is None:
        return code, why
    for line in lines_about(over, agents):
        terminal.say(line)
    conclusion = conclusion_of(over, agents)
    if conclusion.exit_code:
        end = JobEnd(conclusion.exit_code, {"message": conclusion.reason}, len(over.agents), 0.0, over.digest)
        write_end(RunFolder(run_dir), end, terminal)
        return conclusion.exit_code, conclusion.reason
    return code, why


def _word_in(run_dir: Path) -> JobOver | None:
    """The coordinator's last word, if training is complete and its journal can be read."""
    with suppress(OSError, Unreadable, KeyError, ValueError):
        said = [line for line in read_lines(run_dir / "journal.jsonl") if line.get("event") == "over"][-1:]
        for line in said:
            over = JobOver(digest=line["digest"], main_agent=line["main_agent"], agents=tuple(line["agents"]))
            return over if over.is_done else None
    return None
